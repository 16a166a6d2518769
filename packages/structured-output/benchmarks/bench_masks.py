"""Masks of a step for 32 requests with GPT-2's vocabulary, along realistic and random texts, and compiling."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_structured_output import ConstrainedRequests, GrammarCompiler
from llmstack_structured_output.vocabulary import load_vocabulary
from llmstack_types import StructuredOutputsParams

FOLDER = Path(os.environ.get("LLMSTACK_BENCH_TOKENIZER", Path(__file__).parents[4] / "shared/models/gpt2"))
VOCAB_SIZE, EOS = 50_257, (50_256,)
NUM_REQUESTS = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXT = (
    '{"name": "Jane Doe", "age": 42, "tags": ["a tall woman", "friendly", "from Berlin"], '
    '"address": {"street": "12 Main Street, second floor", "zip": "10117"}}'
)
CONSTRAINT = StructuredOutputsParams(json=json.dumps(PERSON))

pytestmark = pytest.mark.skipif(not (FOLDER / "tokenizer.json").is_file(), reason="GPT-2's tokenizer is not at hand")


class Steps:
    """Requests at different places of their texts, each of which starts again at its end."""

    def __init__(self, kind: str, num_requests: int) -> None:
        self.requests = ConstrainedRequests(str(FOLDER), VOCAB_SIZE)
        self._is_random = kind == "random"
        self._rng = random.Random(0)
        vocabulary = load_vocabulary(FOLDER, VOCAB_SIZE, EOS)
        self._token_ids = vocabulary.tokenizer.tokenize_str(TEXT)
        self._names = itertools.count()
        self.rows = [(self._begin(), ()) for _ in range(num_requests)]
        self._places = [0] * num_requests
        for index in range(num_requests):
            for _ in range(index):
                self._advance(index)

    def masks(self) -> bytearray:
        """Those of one step."""
        return self.requests.masks(self.rows)

    def advance(self) -> None:
        """One token for each."""
        for index in range(len(self.rows)):
            self._advance(index)

    def _begin(self) -> str:
        name = str(next(self._names))
        self.requests.start(name, CONSTRAINT, EOS)
        return name

    def _advance(self, index: int) -> None:
        name = self.rows[index][0]
        if self._places[index] == len(self._token_ids):
            self.requests.end(name)
            self.rows[index], self._places[index] = (self._begin(), ()), 0
            return
        self.requests.accept(name, [self._next_token(index, name)])
        self._places[index] += 1

    def _next_token(self, index: int, name: str) -> int:
        if not self._is_random:
            return self._token_ids[self._places[index]]
        mask = self.requests.masks([(name, ())])
        allowed = [token_id for token_id in range(VOCAB_SIZE) if mask[token_id // 8] >> token_id % 8 & 1]
        return self._rng.choice(allowed)


@pytest.mark.parametrize("num_requests", [1, NUM_REQUESTS])
@pytest.mark.parametrize("kind", ["realistic", "random"])
def test_bench_masks(benchmark: BenchmarkFixture, kind: str, num_requests: int) -> None:
    steps = Steps(kind, num_requests)
    benchmark.pedantic(steps.masks, setup=steps.advance, rounds=60)


def test_bench_accept(benchmark: BenchmarkFixture) -> None:
    steps = Steps("realistic", NUM_REQUESTS)
    benchmark.pedantic(steps.advance, setup=lambda: steps.masks() and None, rounds=60)


def test_bench_compile(benchmark: BenchmarkFixture) -> None:
    compiler = GrammarCompiler(FOLDER, VOCAB_SIZE, EOS)
    compiler.compile(StructuredOutputsParams(regex="a"))  # reads the vocabulary
    numbers = itertools.count()

    def compile_another() -> None:
        compiler.compile(StructuredOutputsParams(json=json.dumps(PERSON | {"title": str(next(numbers))})))

    benchmark(compile_another)


def test_bench_find_in_cache(benchmark: BenchmarkFixture) -> None:
    compiler = GrammarCompiler(FOLDER, VOCAB_SIZE, EOS)
    benchmark(lambda: compiler.compile(CONSTRAINT).new_matcher())
