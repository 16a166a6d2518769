"""Scores of pairs of texts, for `/score` and `/rerank`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import IntegerRule
from llmstack_llm.pooling.prompt import LimitedText, TextPair
from llmstack_llm.pooling.scoring import ScorePlan, combine, plan_scores
from llmstack_server.apis.pooling.engine_run import MAX_NUM_INPUTS, admit_all, count_tokens, run_all
from llmstack_server.apis.pooling.protocol import PairFields
from llmstack_server.protocols import AdmittedInput
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import PoolingFields
from llmstack_types import PoolingParams

MAX_NUM_CHARS = 1 << 24
"""Characters of all prompts together: each pair repeats the query, so prompts can far exceed the request."""


def parse_texts(value: Any, param: str) -> list[str]:
    """One text or several, each a string or an object with a `text`.

    Raises:
        InvalidRequestError: Missing, empty, too many, or of a wrong type.
    """
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, list):
        return [_text(value, param, "a string or an array")]
    if not value:
        raise request_errors.empty_array(param)
    if len(value) > MAX_NUM_INPUTS:
        raise request_errors.array_too_long(param, MAX_NUM_INPUTS, len(value))
    return [_text(entry, f"{param}[{index}]", "a string") for index, entry in enumerate(value)]


def _text(value: Any, param: str, expected: str) -> str:
    text = value.get("text") if isinstance(value, Mapping) else value
    if isinstance(text, str):
        return text
    if isinstance(value, Mapping) and value.get("content"):
        raise request_errors.unsupported_parameter(f"{param}.content", "scores are of texts, in the field 'text'")
    if isinstance(value, Mapping) and text is None:
        raise missing_parameter(f"{param}.text")
    raise request_errors.invalid_type(param, expected, value)


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """A checked request: the prompts to run, and the plan that makes scores from their outputs."""

    state: ServerState
    fields: PoolingFields
    plan: ScorePlan
    inputs: Sequence[AdmittedInput]

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens of all prompts."""
        return count_tokens(self.inputs)

    async def run(self, request_id: str) -> list[float]:
        """Runs the prompts; returns the score of each pair, in order."""
        numbers: list[Sequence[float]] = [()] * len(self.inputs)
        async for index, output in run_all(self.state, self.inputs, self.fields, request_id):
            numbers[index] = output.outputs.data
        scores = []
        for pair in self.plan.pairs:
            scores.append(combine([numbers[index] for index in pair]))
            await asyncio.sleep(0)  # a product of long vectors takes a tenth of a millisecond
        return scores


async def prepare_scores(
    state: ServerState,
    fields: PairFields,
    texts: tuple[Sequence[str], Sequence[str]],
    names: tuple[str, str],
) -> ScoreJob:
    """Plans and admits the prompts of a request whose fields were checked.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    await state.engine.wait_until_ready()
    params = PoolingParams(
        use_activation=fields.use_activation,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        truncation_side=fields.truncation_side or "right",
    )
    limits = state.engine.limits
    queries = _limited(texts[0], "max_tokens_per_query", fields.max_tokens_per_query, limits)
    documents = _limited(texts[1], "max_tokens_per_doc", fields.max_tokens_per_doc, limits)
    plan = plan_scores(queries, documents, limits, params, names=names)
    num_chars = sum(_num_chars(one.prompt) for one in plan.prompts)
    if num_chars > MAX_NUM_CHARS:
        raise request_errors.too_much_text(names[1], MAX_NUM_CHARS, num_chars)
    prompts = ((one.prompt, one.param) for one in plan.prompts)
    return ScoreJob(state, fields, plan, await admit_all(state, prompts, plan.pooling_params, fields.model))


def _limited(texts: Sequence[str], param: str, maximum: int | None, limits: AdmissionLimits) -> Sequence[str]:
    """The texts, each with the limit on its tokens; None and 0 are none."""
    IntegerRule(0, limits.max_request_tokens - 1, is_optional=True).check(param, maximum)
    return [LimitedText(text, maximum) for text in texts] if maximum else texts


def _num_chars(prompt: str | TextPair) -> int:
    return len(prompt) if isinstance(prompt, str) else len(prompt.first) + len(prompt.second)
