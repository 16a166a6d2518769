"""The guide to a new kind of layer state names exactly the files that know of the one that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = re.compile(r"short_convolution|ShortConvolution|convolution_tail|Lfm2ForCausalLM|models\.lfm2")

GGUF_NAMES = "packages/gguf/src/llmstack_gguf/tensor_names.py"  # what files of llama.cpp call the same tensors


def guide() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("<!-- layer state: begin")[2].partition("<!-- layer state: end")[0]


def test_the_files_of_the_guide_are_those_that_name_the_convolution() -> None:
    sources = (ROOT / "packages").glob("*/src/**/*.py")
    found = {path.relative_to(ROOT).as_posix() for path in sources if NAMES.search(path.read_text(encoding="utf-8"))}
    found.remove(GGUF_NAMES)
    listed = re.findall(r"^\d\. `([^`]+)`", guide(), re.MULTILINE)
    assert {f"packages/model-runner/src/llmstack_model_runner/{name}" for name in listed} == found
    assert len(listed) <= 12
