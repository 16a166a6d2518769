"""Modules that the package imports: an API process pays for them at every start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import llmstack_llm

HEAVY = ("torch", "transformers", "numpy", "pydantic", "huggingface_hub")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return set(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split())


def test_importing_the_package_loads_nothing_else():
    loaded = modules_after("import llmstack_llm")
    assert loaded.isdisjoint({"tokenizers", "jinja2", "tqdm", "asyncio", "llmstack_engine_core", *HEAVY})


def test_the_front_end_of_a_server_loads_neither_torch_nor_a_progress_bar():
    loaded = modules_after("from llmstack_llm import AsyncLLM, EngineArgs")
    assert loaded.isdisjoint({"tqdm", *HEAVY})
    assert "tokenizers" in loaded


def test_offline_use_loads_no_torch():
    assert modules_after("from llmstack_llm import LLM, SamplingParams").isdisjoint(HEAVY)


def test_every_public_name_is_there():
    for name in llmstack_llm.__all__:
        assert getattr(llmstack_llm, name) is not None
    assert llmstack_llm.AsyncLLMEngine is llmstack_llm.AsyncLLM
    assert llmstack_llm.AsyncEngineArgs is llmstack_llm.EngineArgs
    with pytest.raises(AttributeError):
        _ = llmstack_llm.no_such_name
