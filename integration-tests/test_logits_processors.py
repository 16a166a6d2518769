"""The page on logits processors is run as it stands; bad words over the whole stack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_demo_model import model_path
from llmstack_llm import LLM, SamplingParams

PAGE = Path(__file__).resolve().parents[1] / "docs" / "logits-processors.md"
PROMPT = "Once upon a time there was a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `favour.py` was saved."""
    (tmp_path / "favour.py").write_text(python_blocks()[0])
    return tmp_path


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_the_offline_example_runs(folder: Path) -> None:
    script = folder / "example.py"
    script.write_text(python_blocks()[1])
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment(folder)
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" fox") >= 4


def test_a_server_takes_processors_by_flag_and_arguments_by_request(folder: Path, serve: Any) -> None:
    with serve("--logits-processors", "favour:FavourToken", env=environment(folder)) as server:
        client, model = server.client, server.client.models.list().data[0].id
        arguments: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        plain = client.completions.create(**arguments, extra_body={"return_token_ids": True})
        favoured = client.completions.create(
            **arguments, extra_body={"return_token_ids": True, "vllm_xargs": {"favour": 300}}
        )
        assert 300 not in plain.choices[0].token_ids  # type: ignore[attr-defined]  # our extension
        assert favoured.choices[0].token_ids == [300] * 6  # type: ignore[attr-defined]  # our extension


def test_bad_words_are_not_said() -> None:
    with LLM(str(model_path()), generation_config="vllm") as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=24)
        text = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text
        words = sorted({word for word in re.findall(r"[a-z]+", text) if len(word) > 2})[:4]
        assert words
        params = SamplingParams(temperature=0.0, max_tokens=24, bad_words=words)
        other = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
        assert not {f" {word} " for word in words} & {f" {word} " for word in re.findall(r"[a-z]+", other)}
