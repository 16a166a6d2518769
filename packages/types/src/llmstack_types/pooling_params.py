"""Parameters of pooling: the result of one prompt's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingTask(StrEnum):
    """The kind of result of a pooling request; the values are vLLM's."""

    EMBED = "embed"
    """One vector."""
    CLASSIFY = "classify"
    """A number for each of the model's labels."""
    SCORE = "score"
    """How well a pair of texts fits: `CLASSIFY` by a model of one label, which is what it becomes at admission."""
    TOKEN_EMBED = "token_embed"  # noqa: S105 (no password)
    """A vector for each token."""
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105 (no password)
    """For each token what `CLASSIFY` gives for the prompt."""

    ALIGNMENT = "alignment"
    """For each token how much it attends to each part of the prompt's sound, by the heads that follow it."""

    @property
    def is_per_token(self) -> bool:
        """Whether each token has numbers of its own."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY, PoolingTask.ALIGNMENT)

    @property
    def gives_vectors(self) -> bool:
        """Whether the numbers are those of vectors, which may be cut and normalized."""
        return self in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)

    @property
    def gives_labels(self) -> bool:
        """Whether the numbers are those of labels, not vectors."""
        return self in (PoolingTask.CLASSIFY, PoolingTask.SCORE, PoolingTask.TOKEN_CLASSIFY)


class PoolingType(StrEnum):
    """Which of the prompt's hidden states count."""

    CLS = "cls"
    """The first token's."""
    MEAN = "mean"
    """All of them, averaged."""
    LAST = "last"
    """The last token's."""
    MAX = "max"
    """Of each number the largest of all tokens."""
    WEIGHTED_MEAN = "weighted_mean"
    """All of them, averaged by weights that grow from 1 for the first token by 1 each."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Pooling parameters of one request.

    Pure data: values are checked, and None is replaced by what the model was trained for, in `llmstack_llm`.

    Attributes:
        pooling_type: None means the model's own; tasks with numbers for each token have none.
        normalize: Whether vectors are scaled to length 1; None means as the model does.
        dimensions: Keep this many leading numbers and, under `normalize`, scale the rest to length 1 (Matryoshka
            embeddings); None keeps all.
        task: None means what the model is for: `CLASSIFY` where it has labels, `EMBED` otherwise.
        use_activation: Whether labels get probabilities (None means so), or the bare logits.
        truncate_prompt_tokens: A longer prompt is cut to that many tokens before it is sent; -1 is the longest the
            model takes, None cuts nothing.
        truncation_side: The end that is cut: `right` or `left`.
        second_text_start: Where the second text of a pair begins, for models that tell the two apart: tokens from
            there on are of type 1. None for a single text.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    task: PoolingTask | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"
    second_text_start: int | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token has to be computed: a hit in the prefix cache has no hidden states."""
        return self.pooling_type is not PoolingType.LAST
