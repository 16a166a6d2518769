"""What a pooling request gives back, under vLLM's field names."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """One vector.

    Attributes:
        data: Its numbers as float32; NumPy and PyTorch take it without a copy (`numpy.asarray`, `torch.frombuffer`).
    """

    data: array[float]

    @classmethod
    def from_bytes(cls, vector: bytes) -> PoolingOutput:
        """From little-endian float32."""
        data = array("f", vector)
        if sys.byteorder == "big":
            data.byteswap()
        return cls(data)

    def to_bytes(self) -> bytes:
        """As little-endian float32."""
        data = array("f", self.data)
        if sys.byteorder == "big":
            data.byteswap()
        return data.tobytes()


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One embedding as plain numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class PoolingRequestOutput:
    """What a pooling request has brought; there is one for each request.

    Attributes:
        prompt: The text; None where token ids were given.
        outputs: The vector; empty if `finish_reason` is not `stop`.
        finish_reason: `stop`, `abort` or `error`.
        num_cached_tokens: Prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finish_reason: str = "stop"
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The same with the embedding as plain numbers, as `LLM.embed` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """From the raw output."""
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(output.outputs.data.tolist()),
            output.finished,
            output.num_cached_tokens,
        )
