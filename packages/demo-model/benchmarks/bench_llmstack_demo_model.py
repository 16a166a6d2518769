"""Times what a server does with the folder before it loads a tensor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmstack_demo_model import model_path


def read_header() -> dict[str, Any]:
    with (model_path() / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    return header


def test_reading_the_header_of_the_weights(benchmark: Any) -> None:
    assert benchmark(read_header)


def test_loading_the_tokenizer(benchmark: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert benchmark(tokenizers.Tokenizer.from_file, str(model_path() / "tokenizer.json"))


def test_encoding_a_paragraph(benchmark: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    text = "The old woman sat by the fire and told the children about the fox and the king's golden apple. " * 20
    benchmark.extra_info["characters"] = len(text)
    assert benchmark(tokenizer.encode, text, add_special_tokens=False).ids
