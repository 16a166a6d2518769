"""The objects of the answers of `/v1/decisions`, as types; see `web.answer_types`."""

from __future__ import annotations

from typing import Literal, TypedDict


class _Answer(TypedDict):
    """The name of the question, null where it has none."""

    name: str | None


class PredicateAnswer(_Answer):
    """The probability that a statement is true."""

    type: Literal["predicate"]
    probability: float


class ChoiceProbability(TypedDict):
    """The probability of a choice among those given."""

    value: str | bool
    probability: float


class ChoiceAnswer(_Answer):
    """The likeliest choice; `confidence` is the probability of its letter among all tokens."""

    type: Literal["choice"]
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class ScoreProbability(TypedDict):
    """The probability of a level among those given, with its number from 0 on."""

    value: int
    label: str
    probability: float


class ScoreAnswer(_Answer):
    """The mean of the levels' numbers by their probabilities; `confidence` as in `ChoiceAnswer`."""

    type: Literal["score"]
    score: float
    probabilities: list[ScoreProbability]
    confidence: float


class DecisionInputDetails(TypedDict):
    """Prompt tokens that the prefix cache had, and those that were computed into it."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(TypedDict):
    """Nothing is thought here."""

    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """Tokens of the prompts of all questions."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class Decision(TypedDict):
    """The answers in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage
