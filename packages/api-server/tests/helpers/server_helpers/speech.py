"""A model that transcribes, for tests of its routes: real files and windows, and a text that is given."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmstack_llm import GenerationRequest
from llmstack_llm.outputs.request_output import CompletionOutput, Logprob
from llmstack_llm.speech.served import Speech
from llmstack_media.audio.files import SoundFiles
from llmstack_media.audio.windows import WindowFront
from llmstack_media.sound.log_mel import LogMel
from llmstack_model_files import SpeechTokens
from llmstack_server.testing import ByteTokenizer, FakeEngineClient

END = 300
TOKENS = SpeechTokens(
    start=301, end=END, previous=302, no_timestamps=309, languages={"en": 303, "de": 304},
    tasks={"transcribe": 305, "translate": 306},
)  # fmt: skip
ENGLISH = SpeechTokens(start=301, end=END, previous=302, no_timestamps=309, languages={}, tasks={})


class _Stream:
    def __init__(self, output: CompletionOutput) -> None:
        self.outputs = [output]

    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield self


class SpeechEngine(FakeEngineClient):
    """Says `texts` in each window, one after the other, half a second each. Its tokens are bytes.

    Attributes:
        requests: What was submitted.
    """

    def __init__(self, *texts: str, tokens: SpeechTokens = TOKENS, max_s: float = 60.0) -> None:
        super().__init__()
        self.texts = texts
        self.requests: list[GenerationRequest] = []
        self.tokens = tokens
        self.files = SoundFiles(16_000, max_s=max_s)
        log_mel = LogMel(80)
        self.speech = Speech(tokens, WindowFront(log_mel), 16_000, log_mel.num_samples, 448, self.files)

    async def submit(self, *requests: GenerationRequest) -> Any:
        """The texts, or the probabilities of a detection; the requests are kept."""
        (request,) = requests
        self.requests.append(request)
        if request.sampling.values.get("logprob_token_ids"):
            probabilities = {self.tokens.no_speech: 0.05, 303: 0.2, 304: 0.6}
            position = {token: Logprob(math.log(value)) for token, value in probabilities.items()}
            return _Stream(CompletionOutput(0, "", [1], None, [position]))
        token_ids: list[int] = []
        for index, text in enumerate(self.texts):
            begin = self.tokens.first_timestamp + 25 * index
            token_ids += [begin, *text.encode(), begin + 25]
        token_ids.append(END)
        logprobs = [{token: Logprob(-0.25, decoded_token=chr(token % 256))} for token in token_ids]
        return _Stream(CompletionOutput(0, "", token_ids, -0.25 * len(token_ids), logprobs))


class AlignedEngine(SpeechEngine):
    """The same with times of words: each token begins a hundredth of a second after the one before."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.limits = dataclasses.replace(self.limits, alignment_size=1)
        self.speech = Speech(self.tokens, _Aligner(LogMel(80)), 16_000, 480_000, 448, self.files)

    async def get_tokenizer(self, param: str = "prompt") -> Any:
        """One with the bytes of each token."""
        tokenizer: Any = ByteTokenizer()
        tokenizer.bytes_of = lambda token_id: bytes([token_id])
        return tokenizer

    async def encode(self, prompt: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """A number for each token."""
        numbers = array("f", [0.0] * len(prompt.token_ids))
        yield SimpleNamespace(prompt_token_ids=prompt.token_ids, outputs=SimpleNamespace(data=numbers))


class _Aligner(WindowFront):
    def token_starts(self, weights: memoryview, num_tokens: int, num_samples: int) -> list[float]:
        return [0.01 * index for index in range(num_tokens)]


def wav(seconds: float = 1.0, amplitude: float = 0.3) -> bytes:
    """A file of a tone."""
    samples = amplitude * np.sin(2 * np.pi * 440 * np.arange(int(16_000 * seconds)) / 16_000)
    data = (samples * 32767).astype("<i2").tobytes()
    head = b"WAVEfmt \x10\0\0\0\1\0\1\0" + (16_000).to_bytes(4, "little") + (32_000).to_bytes(4, "little")
    body = head + b"\2\0\x10\0data" + len(data).to_bytes(4, "little") + data
    return b"RIFF" + len(body).to_bytes(4, "little") + body
