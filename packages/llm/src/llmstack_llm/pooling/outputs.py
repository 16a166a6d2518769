"""Outputs of a pooling request, under vLLM's field names."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from llmstack_llm.pooling.scoring import combine


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The numbers of a pooled prompt.

    Attributes:
        data: They as float32; NumPy and PyTorch take them without a copy (`numpy.asarray`, `torch.frombuffer`).
        num_vectors: With `token_embed`, how many vectors of one length they are, one after the other.
    """

    data: array[float]
    num_vectors: int | None = None

    @classmethod
    def from_bytes(cls, numbers: bytes, num_vectors: int | None = None) -> PoolingOutput:
        data = array("f", numbers)
        if sys.byteorder == "big":
            data.byteswap()
        return cls(data, num_vectors)

    def tolist(self) -> list[float] | list[list[float]]:
        """Plain numbers; with `num_vectors`, a list for each vector."""
        if self.num_vectors is None:
            return self.data.tolist()
        return list(map(self.vector, range(self.num_vectors)))

    def vector(self, number: int) -> list[float]:
        """One of the `num_vectors` vectors, as plain numbers."""
        size = len(self.data) // (self.num_vectors or 1)
        return self.data[number * size : (number + 1) * size].tolist()

    def to_bytes(self) -> bytes:
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
        """The number of values of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A number for each of the model's labels: probabilities, unless bare logits were asked for."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The output of a pooling request; there is one for each request.

    Attributes:
        prompt: The text; None where token ids or a pair of texts were given.
        outputs: Its numbers; empty if `finish_reason` is not `stop`.
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


_Output = TypeVar("_Output")


@dataclass(slots=True)
class _TaskRequestOutput(Generic[_Output]):
    """Output of a pooling request, with the result in the form of one task."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: _Output
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(_TaskRequestOutput[EmbeddingOutput]):
    """The output of `LLM.embed` for each prompt."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """Makes the output of the raw one."""
        return cls(*_head(output), EmbeddingOutput(output.outputs.data.tolist()), *_tail(output))


class ClassificationRequestOutput(_TaskRequestOutput[ClassificationOutput]):
    """The output of `LLM.classify` for each prompt."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> ClassificationRequestOutput:
        """Makes the output of the raw one."""
        return cls(*_head(output), ClassificationOutput(output.outputs.data.tolist()), *_tail(output))


class ScoringRequestOutput(_TaskRequestOutput[ScoringOutput]):
    """The output of `LLM.score` for each pair; the token ids are those of both texts."""

    @classmethod
    def from_parts(cls, outputs: Sequence[PoolingRequestOutput]) -> ScoringRequestOutput:
        """Makes the output of the raw ones of one pair."""
        last = outputs[-1]
        token_ids = [token_id for output in outputs for token_id in output.prompt_token_ids]
        score = combine([output.outputs for output in outputs])
        num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        return cls(last.request_id, None, token_ids, ScoringOutput(score), True, num_cached_tokens)


def _head(output: PoolingRequestOutput) -> tuple[str, str | None, list[int]]:
    return output.request_id, output.prompt, output.prompt_token_ids


def _tail(output: PoolingRequestOutput) -> tuple[bool, int]:
    return output.finished, output.num_cached_tokens
