"""Scores of pairs of texts or pictures: cross encoder, cosine, late interaction."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.pooling.prompt import TextPair
from llmstack_llm.pooling.score_content import ScoreContent, ScoreText
from llmstack_types import PoolingParams, PoolingTask


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """One prompt to pool, a content before it is rendered; `param` is what the user calls it."""

    prompt: ScoreText | TextPair
    param: str


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The plan for the scores of one request.

    Attributes:
        pooling_params: The parameters of every prompt.
        pairs: For each pair the prompts, by their index, whose numbers make its score: one, or two.
    """

    prompts: list[ScorePrompt]
    pooling_params: PoolingParams
    pairs: list[tuple[int, ...]]


def plan_scores(
    texts_1: Sequence[ScoreText],
    texts_2: Sequence[ScoreText],
    limits: AdmissionLimits,
    params: PoolingParams | None = None,
    *,
    names: tuple[str, str] = ("data_1", "data_2"),
) -> ScorePlan:
    """The plan for pairs of one text with each of `texts_2`, or of the texts one by one.

    A model of one label reads each pair; any other model that gives vectors gives one to each text. A content with
    pictures is one too: a message of the user, in the model's chat template. Of a pair it has to be texts.

    `params`: How prompts are cut, and whether a label's number goes through its activation.
    `names`: The user's names of the two lists.

    Raises:
        InvalidRequestError: A list is empty, their lengths do not match, the model is a classifier of many labels, or
            it reads pairs, and there are pictures.
    """
    for name, texts in zip(names, (texts_1, texts_2), strict=True):
        if not texts:
            raise request_errors.empty_array(name)
    if len(texts_1) not in (1, len(texts_2)):
        reason = f"expected 1 text, or as many as '{names[1]}' has, which are {len(texts_2)}"
        raise request_errors.invalid_value(names[0], reason)
    if limits.labels_tokens:
        raise request_errors.pooling_not_supported("Score", "it labels tokens")
    if limits.num_labels > 1:
        raise request_errors.pooling_not_supported("Score", f"it tells {limits.num_labels} labels apart")
    firsts = [0] * len(texts_2) if len(texts_1) == 1 else list(range(len(texts_2)))
    params = params or PoolingParams()
    if limits.num_labels == 1:
        return _plan_pairs(texts_1, texts_2, firsts, params, names)
    task = PoolingTask.TOKEN_EMBED if limits.gives_token_vectors else PoolingTask.EMBED
    return _plan_vectors(texts_1, texts_2, firsts, _with(params, task), names)


class Pooled(Protocol):
    """The numbers of a pooled prompt; `num_vectors` is None unless they are vectors of tokens, one after the other."""

    @property
    def data(self) -> array[float]: ...

    @property
    def num_vectors(self) -> int | None: ...


def combine(outputs: Sequence[Pooled]) -> float:
    """The score of a pair: the number of its one prompt, the product of two vectors of length 1, or late interaction.

    Late interaction is ColBERT's: for each token of the first text the best product with one of the second, summed up.
    """
    if len(outputs) == 1:
        return outputs[0].data[0]
    first, second = outputs
    if first.num_vectors is None or second.num_vectors is None:
        product: float = sum(map(mul, first.data, second.data))
        return product
    from llmstack_media.vectors import late_interaction  # late, since only models of token vectors need arrays

    return late_interaction(first.data, first.num_vectors, second.data, second.num_vectors)


class PairScores:
    """Scores of pairs, each made once its outputs are there; outputs that no other pair needs are dropped.

    Attributes:
        scores: The score of each pair, in order.
    """

    def __init__(self, pairs: Sequence[tuple[int, ...]]) -> None:
        """`pairs`: Those of a `ScorePlan`."""
        self.scores = [0.0] * len(pairs)
        self._pairs = pairs
        self._index_to_open: dict[int, set[int]] = {}
        for number, pair in enumerate(pairs):
            for index in pair:
                self._index_to_open.setdefault(index, set()).add(number)
        self._waiting: dict[int, Pooled] = {}

    def add(self, index: int, output: Pooled) -> Iterator[float]:
        """Makes the scores that the output of a prompt completes, one at a time: to be consumed to its end."""
        self._waiting[index] = output
        for number in sorted(self._index_to_open[index]):
            pair = self._pairs[number]
            if all(one in self._waiting for one in pair):
                self.scores[number] = combine([self._waiting[one] for one in pair])
                for one in pair:
                    self._index_to_open[one].discard(number)
                    if not self._index_to_open[one]:
                        del self._waiting[one]  # vectors of all tokens of a long text are megabytes
                yield self.scores[number]


def _plan_pairs(
    texts_1: Sequence[ScoreText],
    texts_2: Sequence[ScoreText],
    firsts: Sequence[int],
    params: PoolingParams,
    names: tuple[str, str],
) -> ScorePlan:
    prompts = [
        ScorePrompt(TextPair(_text_of(texts_1[first]), _text_of(second)), f"{names[1]}[{index}]")
        for index, (first, second) in enumerate(zip(firsts, texts_2, strict=True))
    ]
    pairs: list[tuple[int, ...]] = [(index,) for index in range(len(prompts))]
    return ScorePlan(prompts, _with(params, PoolingTask.SCORE), pairs)


def _text_of(text: ScoreText) -> str:
    return text.text if isinstance(text, ScoreContent) else text


def _plan_vectors(
    texts_1: Sequence[ScoreText],
    texts_2: Sequence[ScoreText],
    firsts: Sequence[int],
    params: PoolingParams,
    names: tuple[str, str],
) -> ScorePlan:
    prompts = [
        ScorePrompt(text, f"{name}[{index}]")
        for name, texts in zip(names, (texts_1, texts_2), strict=True)
        for index, text in enumerate(texts)
    ]
    pairs: list[tuple[int, ...]] = [(first, len(texts_1) + index) for index, first in enumerate(firsts)]
    return ScorePlan(prompts, params, pairs)


def _with(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    is_embedding = task.gives_vectors
    return PoolingParams(
        normalize=True if is_embedding else None,
        task=task,
        use_activation=None if is_embedding else params.use_activation,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side,
    )
