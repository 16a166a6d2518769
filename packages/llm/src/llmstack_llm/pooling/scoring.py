"""Scores of pairs of texts or pictures, by cross encoder or cosine of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

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
    return _plan_vectors(texts_1, texts_2, firsts, params, names)


def combine(numbers: Sequence[Sequence[float]]) -> float:
    """The score of a pair: the number of its one prompt, or the product of the two vectors, which have length 1."""
    if len(numbers) == 1:
        return numbers[0][0]
    first, second = numbers
    product: float = sum(map(mul, first, second))
    return product


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
    return ScorePlan(prompts, _with(params, PoolingTask.EMBED), pairs)


def _with(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    is_embedding = task is PoolingTask.EMBED
    return PoolingParams(
        normalize=True if is_embedding else None,
        task=task,
        use_activation=None if is_embedding else params.use_activation,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side,
    )
