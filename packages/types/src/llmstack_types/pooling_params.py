"""How the hidden states of one prompt become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingType(StrEnum):
    """Which of the prompt's hidden states count."""

    CLS = "cls"
    """The first token's."""
    MEAN = "mean"
    """All of them, averaged."""
    LAST = "last"
    """The last token's."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Pooling parameters of one request.

    Pure data: values are checked, and None is replaced by what the model was trained for, in `llmstack_llm`.

    Attributes:
        pooling_type: None means the model's own.
        normalize: Whether the vector is brought to length 1; None means as the model does.
        dimensions: Keep this many leading numbers and, under `normalize`, bring what is left to length 1 (Matryoshka
            embeddings); None keeps all.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token has to be computed: a hit in the prefix cache brings no hidden states."""
        return self.pooling_type is not PoolingType.LAST
