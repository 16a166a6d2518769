"""llama.cpp computes the same from the files that the other tests compare with transformers.

So these files have the form that it reads, and not one that the tests alone think of.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from model_runner_helpers.gguf_checkpoints import loaded, make_model, tensors_of, write_file
from model_runner_helpers.gguf_decoders import DECODERS
from model_runner_helpers.gguf_families import FAMILIES
from model_runner_helpers.llama_cpp import llama_cpp_tokens

ALL = {**FAMILIES, **DECODERS}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NUM_TOKENS = 8
# Of log-probabilities. llama.cpp looks up GELU in a table of float16, and Kimi's norms have an epsilon of their own.
TOLERANCE, TOLERANCE_OF_GELU = 5e-4, 1e-2


@pytest.mark.parametrize("name", ALL)
def test_llama_cpp_writes_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family, path = ALL[name], tmp_path / "model.gguf"
    model = make_model(family)
    write_file(path, family, model.config, tensors_of(family, model, tmp_path / "repository"))
    harness = loaded(path)
    steps = llama_cpp_tokens(path, PROMPT, NUM_TOKENS)

    assert [next(iter(step)) for step in steps] == harness.greedy(PROMPT, NUM_TOKENS)
    ours = harness.step([("a", PROMPT)])[-1].log_softmax(-1)
    tolerance = TOLERANCE_OF_GELU if "gemma" in family.architecture else TOLERANCE
    assert len(steps[0]) == 20
    assert max(abs(float(ours[token]) - value) for token, value in steps[0].items()) <= tolerance
