"""Scores of pairs of texts or pictures, for `/score` and `/rerank`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmstack_llm import ChatPrompt, RenderedPrompt, request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import IntegerRule
from llmstack_llm.media.processor import MediaRequest
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.prompt import LimitedText, TextPair
from llmstack_llm.pooling.score_content import ScoreContent, ScoreText, read_score_text
from llmstack_llm.pooling.scoring import PairScores, ScorePlan, plan_scores
from llmstack_server.apis.pooling.engine_run import MAX_NUM_INPUTS, admit_all, count_tokens, run_all
from llmstack_server.apis.pooling.protocol import PairFields
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import PoolingFields
from llmstack_types import PoolingParams, PoolingTask

MAX_NUM_CHARS = 1 << 24
"""Characters of all prompts together: each pair repeats the query, so prompts can far exceed the request."""

MAX_NUM_TOKEN_PAIRS = 1 << 28
"""Tokens of queries times tokens of documents, of all pairs together, where each token has a vector: about a second."""


def parse_texts(value: object, param: str) -> list[str]:
    """`parse_contents`, of texts alone."""
    texts: list[str] = []
    for one in parse_contents(value, param):
        if isinstance(one, ScoreContent):
            raise request_errors.unsupported_parameter(f"{one.param}.content", "texts stand in the field 'text'")
        texts.append(one)
    return texts


def parse_contents(value: object, param: str) -> list[ScoreText]:
    """One text or several, each a string, an object with a `text`, or one with a `content` of texts and pictures.

    Raises:
        InvalidRequestError: Missing, empty, too many, or of a wrong type.
    """
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, list):
        return [read_score_text(value, param, "a string or an array")]
    if not value:
        raise request_errors.empty_array(param)
    if len(value) > MAX_NUM_INPUTS:
        raise request_errors.array_too_long(param, MAX_NUM_INPUTS, len(value))
    return [read_score_text(entry, f"{param}[{index}]") for index, entry in enumerate(value)]


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """A checked request: the prompts to run, and the plan that makes scores from their outputs."""

    state: ServerState
    fields: PoolingFields
    plan: ScorePlan
    inputs: Sequence[AdmittedPooling]

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens of all prompts."""
        return count_tokens(self.inputs)

    async def run(self, request_id: str) -> list[float]:
        """Runs the prompts; returns the score of each pair, in order."""
        made = PairScores(self.plan.pairs)
        async for index, output in run_all(self.state, self.inputs, self.fields, request_id):
            for _ in made.add(index, output.outputs):
                await asyncio.sleep(0)  # a product of long vectors takes a tenth of a millisecond
        return made.scores


async def prepare_scores(
    state: ServerState,
    fields: PairFields,
    texts: tuple[Sequence[ScoreText], Sequence[ScoreText]],
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
    prompts = await _render(state, plan)
    inputs = await admit_all(state, prompts, plan.pooling_params, fields.model)
    if plan.pooling_params.task == PoolingTask.TOKEN_EMBED:
        check_token_pairs(plan, [len(one.prompt_token_ids) for one in inputs], names[1])
    return ScoreJob(state, fields, plan, inputs)


def check_token_pairs(plan: ScorePlan, lengths: Sequence[int], name: str) -> None:
    """Refuses pairs whose products take too long; `lengths`: Tokens of each prompt of the plan.

    Raises:
        InvalidRequestError: Names the documents.
    """
    num_pairs = sum(math.prod(lengths[index] for index in pair) for pair in plan.pairs)
    if num_pairs > MAX_NUM_TOKEN_PAIRS:
        reason = f"each token is compared with each of the query: {num_pairs} pairs, and {MAX_NUM_TOKEN_PAIRS} at most"
        raise request_errors.invalid_value(name, reason)


async def _render(state: ServerState, plan: ScorePlan) -> list[tuple[str | TextPair | RenderedPrompt, str]]:
    """The prompts with their names: contents as conversations, their pictures counted and not decoded."""
    is_cut = plan.pooling_params.truncate_prompt_tokens is not None
    empty = ChatPrompt(
        (), add_generation_prompt=False, is_cut=is_cut, tenant=current_client.get().tenant,
        media_request=MediaRequest(),
    )  # fmt: skip
    prompts: list[tuple[str | TextPair | RenderedPrompt, str]] = []
    for one in plan.prompts:
        if isinstance(one.prompt, ScoreContent):
            prompts.append((await state.engine.render(replace(empty, messages=one.prompt.messages)), one.param))
        else:
            prompts.append((one.prompt, one.param))
    return prompts


def _limited(
    texts: Sequence[ScoreText], param: str, maximum: int | None, limits: AdmissionLimits
) -> Sequence[ScoreText]:
    """The texts, each with the limit on its tokens; None and 0 are none."""
    IntegerRule(0, limits.max_request_tokens - 1, is_optional=True).check(param, maximum)
    if not maximum:
        return texts
    limited = []
    for text in texts:
        if isinstance(text, ScoreContent):
            raise request_errors.unsupported_value(param, "a 'content' is not cut")
        limited.append(LimitedText(text, maximum))
    return limited


def _num_chars(prompt: ScoreText | TextPair) -> int:
    if isinstance(prompt, ScoreContent):
        return sum(map(len, prompt.texts))
    return len(prompt) if isinstance(prompt, str) else len(prompt.first) + len(prompt.second)
