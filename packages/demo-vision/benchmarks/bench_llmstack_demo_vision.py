"""Times what a server does with the folder before it loads a tensor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmstack_demo_vision import model_path


def test_reading_the_header_of_the_weights(benchmark: Any) -> None:
    def read_header() -> dict[str, Any]:
        with (model_path() / "model.safetensors").open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return header

    assert benchmark(read_header)


def test_loading_the_tokenizer(benchmark: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert benchmark(tokenizers.Tokenizer.from_file, str(model_path() / "tokenizer.json"))
