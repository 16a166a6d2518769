"""Text as it grows: time per token."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers.decoders import DecodeStream

from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.detokenizer import make_detokenizer
from llmstack_llm.text.stop_strings import StopStringMatcher, StopStringStream
from llmstack_llm.text.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[4] / "shared" / "models"
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside; café, 😀! " * 20


def load(name: str) -> Tokenizer:
    if name == "bytes":
        return Tokenizer(byte_tokenizer())
    path = MODELS / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"the tokenizer of {name} is not at hand")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))


@pytest.mark.parametrize("name", ["bytes", "gpt2", "stories260k"])
def test_append(benchmark, name: str) -> None:
    tokenizer = load(name)
    token_ids = tokenizer.encode(TEXT)

    def run() -> None:
        detokenizer = make_detokenizer(tokenizer)
        for token_id in token_ids:
            detokenizer.append(token_id)
        detokenizer.finish()

    benchmark(run)
    benchmark.extra_info["microseconds_per_token"] = 1e6 * benchmark.stats["median"] / len(token_ids)


def test_decode_stream_of_the_library(benchmark) -> None:
    tokenizer = load("gpt2")
    token_ids = tokenizer.encode(TEXT)

    def run() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            stream.step(tokenizer.backend, token_id)

    benchmark(run)
    benchmark.extra_info["microseconds_per_token"] = 1e6 * benchmark.stats["median"] / len(token_ids)


@pytest.mark.parametrize("num_stops", [1, 16])
def test_stop_strings(benchmark, num_stops: int) -> None:
    pieces = [TEXT[start : start + 4] for start in range(0, len(TEXT), 4)]
    matcher = StopStringMatcher([f"\n\nHuman {index}:" for index in range(num_stops)])

    def run() -> None:
        stream = StopStringStream(matcher)
        for piece in pieces:
            stream.append(piece)

    benchmark(run)
    benchmark.extra_info["microseconds_per_token"] = 1e6 * benchmark.stats["median"] / len(pieces)
