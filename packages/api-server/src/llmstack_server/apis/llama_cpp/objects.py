"""The objects of the answers of `/infill`, as types; see `web.answer_types`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class TokenProbability(TypedDict):
    """A token with its log-probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class PositionProbabilities(TokenProbability):
    """The token of a place, and the likeliest ones."""

    top_logprobs: list[TokenProbability]


class GenerationSettings(TypedDict):
    """The sampling fields of a request, defaults included."""

    n_ctx: int
    model: str
    n_predict: int | None
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    ignore_eos: bool
    n_probs: int


class Timings(TypedDict):
    """Tokens and milliseconds of the prompt and of the answer; 0 where they are not known."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Infill(TypedDict):
    """The answer of `/infill`; an event of a stream has its first fields alone until the last one."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[PositionProbabilities]]
    model: NotRequired[str]
    prompt: NotRequired[str]
    stop_type: NotRequired[Literal["eos", "limit", "word", "none"]]
    stopping_word: NotRequired[str]
    truncated: NotRequired[bool]
    tokens_cached: NotRequired[int]
    generation_settings: NotRequired[GenerationSettings]
    timings: NotRequired[Timings]
