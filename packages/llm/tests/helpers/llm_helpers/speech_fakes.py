"""A file of words, and an engine that says which of them are in a window."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from llmstack_llm.outputs.request_output import CompletionOutput, Logprob
from llmstack_llm.requests import GenerationRequest
from llmstack_model_files import SpeechTokens
from llmstack_types import ServerOverloadedError

RATE, LEVEL = 1000, 20
WINDOW = 30 * RATE
ENGLISH = SpeechTokens(start=9001, end=9000, previous=9002, no_timestamps=9009, languages={}, tasks={})
TOKENS = SpeechTokens(
    start=9001, end=9000, previous=9002, no_timestamps=9009, languages={"en": 9003, "de": 9004},
    tasks={"transcribe": 9005, "translate": 9006},
)  # fmt: skip


class Said(NamedTuple):
    """A word of a file, in samples."""

    start: int
    stop: int
    word: int


class FakeSound:
    """A file of words, loud while one is said. A part of it is its place in the file."""

    rate, level_samples = RATE, LEVEL

    def __init__(self, words: Sequence[Said], num_samples: int) -> None:
        self.words, self.num_samples = words, num_samples
        self.levels = array("f", [0.0] * -(-num_samples // LEVEL))
        for said in words:
            for index in range(said.start // LEVEL, said.stop // LEVEL):
                self.levels[index] = 0.2

    @property
    def duration_s(self) -> float:
        return self.num_samples / RATE

    async def read(self, start: int, stop: int) -> Any:
        return (start, min(stop, self.num_samples))

    def close(self) -> None: ...


class Windows:
    stats: Any = None

    async def open(self, samples: Any, tenant: str = "", rate: int | None = None, silence_s: int | None = None) -> Any:
        assert samples[1] - samples[0] <= WINDOW
        return samples

    def token_starts(self, weights: memoryview, num_tokens: int, num_samples: int) -> list[float]:
        assert len(weights) == 4 * num_tokens
        return [0.1 * index for index in range(num_tokens)]

    def close(self) -> None: ...


class Tokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" w{token}" for token in token_ids)

    def bytes_of(self, token: int) -> bytes:
        return f" w{token}".encode()


class FakeStream:
    def __init__(self, output: CompletionOutput) -> None:
        self.outputs = [output]

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        yield self


class FakeEngine:
    """Says which words are whole in a window; after `max_words` of them it stops, open or at a timestamp."""

    def __init__(self, sound: FakeSound, max_words: int = 99, *, is_open: bool = False) -> None:
        self.sound, self.max_words, self.is_open = sound, max_words, is_open
        self.requests: list[GenerationRequest] = []
        self.pooled: list[Any] = []
        self.logprob, self.no_speech, self.num_refused = -0.1, 0.01, 0

    async def get_tokenizer(self, param: str = "prompt") -> Tokenizer:
        return Tokenizer()

    async def submit(self, *requests: GenerationRequest) -> FakeStream:
        (request,) = requests
        if self.num_refused and len(self.requests) > 1:
            self.num_refused -= 1
            raise ServerOverloadedError("full")
        self.requests.append(request)
        prompt: Any = request.prompt
        if "logprob_token_ids" in request.sampling.values:
            probabilities = {9008: Logprob(-5.0), 9003: Logprob(-3.0), 9004: Logprob(-0.1)}
            if self.no_speech > 0.5:
                probabilities[9008] = Logprob(-0.1)
            return FakeStream(CompletionOutput(0, "", [1], None, [probabilities]))
        start, stop = prompt.media[0].opened
        token_ids = self.said(start, stop)
        logprobs = [{token: Logprob(self.logprob, decoded_token=f" w{token}")} for token in token_ids]
        return FakeStream(CompletionOutput(0, "", token_ids, self.logprob * len(token_ids), logprobs))

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.pooled.append((request_id, options))
        numbers = array("f", [0.0] * len(prompt.token_ids))
        yield SimpleNamespace(prompt_token_ids=prompt.token_ids, outputs=SimpleNamespace(data=numbers))

    def said(self, start: int, stop: int) -> list[int]:
        whole = [said for said in self.sound.words if said.start >= start and said.stop <= stop]
        cut = [said for said in self.sound.words if said.start < stop < said.stop]
        first = TOKENS.first_timestamp
        token_ids = [first]
        for said in whole[: self.max_words]:
            begin, end = ((place - start) // LEVEL for place in (said.start, said.stop))
            token_ids += [first + begin, said.word, first + end]
        if (self.is_open and len(whole) > self.max_words) or cut:
            token_ids += [token_ids[-1], 8999]  # half of a word, without an end
        return [*token_ids, TOKENS.end]


def file_of(lengths: Sequence[tuple[int, int]]) -> FakeSound:
    """Pauses and words by turns, in levels."""
    words, place = list[Said](), 0
    for number, (pause, length) in enumerate(lengths):
        place += pause * LEVEL
        words.append(Said(place, place + length * LEVEL, number))
        place += length * LEVEL
    return FakeSound(words, place + 40 * LEVEL)


LENGTHS = st.lists(st.tuples(st.sampled_from([0, 5, 20, 50, 400, 2500]), st.integers(50, 400)), min_size=1, max_size=40)
