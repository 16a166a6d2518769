"""The objects of the answers of `/v1/decisions`, as types; see `web.answer_types`."""

from __future__ import annotations

from typing import Literal, TypedDict

from llmstack_server.web.api_types import ResponseUsage


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


class Decision(TypedDict):
    """The answers in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage
