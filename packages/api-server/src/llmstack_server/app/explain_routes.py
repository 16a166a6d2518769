"""`GET /v1/requests/{id}/explanation`: where the time of a request went."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

from starlette.responses import JSONResponse, Response

from llmstack_server.app.explained_text import add_text, recent_prompts
from llmstack_server.state.recent_prompts import MAX_ID_LENGTH
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import ExplainedRequest
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, request_not_found, server_is_overloaded
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types import EngineReady, StepRecording

if TYPE_CHECKING:
    from llmstack_insight.explain import Explanation


# Explanations at one time in an API process, running and waiting, and those of them with estimates.
MAX_EXPLANATIONS = 32
MAX_ESTIMATES = 4
# What API processes ask each other: how long a stream has waited for its client, and which answer has a request id.
READER_TOPIC: Final = "reader"
NAMED_TOPIC: Final = "named"


def add_explanation_route(router: Router, state: ServerState) -> None:
    """Adds the route, which needs the API key. Operators may ask for every request, others for their own."""
    explaining, estimating = _Queue(2), _Queue(1)
    prompts = recent_prompts(state)
    if state.peers is not None:
        state.peers.add_topic(READER_TOPIC, lambda name: _reader_answer(state, name))
        state.peers.add_topic(NAMED_TOPIC, lambda question: _named_answer(state, question))

    @router.declare(RouteSpec(
        "GET", "/v1/requests/{request_id}/explanation", ExplainedRequest, needs=Needs.ENGINE  # it wakes nothing
    ))  # fmt: skip
    async def explanation(request_id: str, estimates: bool = False) -> Response:
        """Explains the time of a request, in sentences and figures, while the server keeps its steps.

        `estimates` adds what it would have been alone, and with single settings changed.
        """
        client = current_client.get()
        tenant = None if client.is_operator else client.tenant
        async with explaining.place(MAX_EXPLANATIONS):
            answer = await _find(request_id, tenant, state)
            if answer is None:
                named = await _named(request_id, tenant, state)
                answer = None if named is None else await _find(named, tenant, state)
            if answer is None:
                raise HTTPError(request_not_found())
            found = await asyncio.to_thread(_explain, answer, tenant, state)
        await add_reader(found, state)
        if prompts is not None:
            await add_text(found, answer.log, answer.ready, prompts, client.tenant, state)
        if estimates:
            async with estimating.place(MAX_ESTIMATES):  # one at a time: each takes up to two seconds of a core
                await asyncio.to_thread(_estimate, found, answer, state)
        if len(answer.parts) > 1:
            add_parts_of(found, answer)
        return JSONResponse({"id": found.request_id, "sentences": found.sentences, "facts": found.facts})


class _Queue:
    """Some at a time; others wait for their turn, and too many are refused."""

    def __init__(self, num_at_once: int) -> None:
        self._turns = asyncio.Semaphore(num_at_once)
        self._num_places = 0

    @asynccontextmanager
    async def place(self, max_num_places: int) -> AsyncIterator[None]:
        """Waits for one's turn, which lasts for the context. Raises HTTPError 503 where all places are taken."""
        if self._num_places >= max_num_places:
            raise HTTPError(server_is_overloaded())
        self._num_places += 1
        try:
            async with self._turns:
                yield
        finally:
            self._num_places -= 1


class _Answer(NamedTuple):
    """The requests of one answer, and the log of the engine core that computed the last of them.

    Attributes:
        name: The request that ended last.
        parts: All requests, in all engine cores.
    """

    name: str
    parts: list[str]
    log: StepRecording
    ready: EngineReady


async def _find(request_id: str, tenant: str | None, state: ServerState) -> _Answer | None:
    """The requests of an answer; None where it is unknown, or of another tenant."""
    from llmstack_insight.explain import last_part, parts_in  # late: few requests need it

    parts: list[str] = []
    found: list[tuple[float, str, StepRecording, EngineReady]] = []
    for engine_index, ready in enumerate(state.engine.engines):
        log = await state.engine.recent_steps(0, engine_index)
        # The rows are read many times.
        log = log._replace(steps=[step._replace(rows=list(step.rows)) for step in log.steps])
        own = await asyncio.to_thread(parts_in, log, request_id, tenant)
        if own:
            name, end_s = await asyncio.to_thread(last_part, log, own)
            parts += own
            found.append((end_s, name, log, ready))
    if not found:
        return None
    _, name, log, ready = max(found, key=lambda one: one[0])
    return _Answer(name, parts, log, ready)


async def _named(http_id: str, tenant: str | None, state: ServerState) -> str | None:
    """The answer with this `X-Request-Id`, in whichever process: of a tenant, or of all."""
    named = state.recent_requests.named(http_id, tenant)
    if named is not None or len(http_id) > MAX_ID_LENGTH:
        return named
    words = [quote(word, safe="") for word in (http_id, tenant) if word is not None]
    answers = await state.ask_peers(" ".join((NAMED_TOPIC, *words)))
    return next((answer for answer in answers if isinstance(answer, str)), None)


async def _named_answer(state: ServerState, question: str) -> str | None:
    http_id, mark, tenant = question.partition(" ")
    return state.recent_requests.named(unquote(http_id), unquote(tenant) if mark else None)


def add_parts_of(found: Explanation, answer: _Answer) -> None:
    """Says that one of several requests is explained."""
    from llmstack_insight.explain import add_parts  # late: few requests need it

    add_parts(found, answer.parts)


def _explain(answer: _Answer, tenant: str | None, state: ServerState) -> Explanation:
    from llmstack_insight.explain import Limits, explain  # late: few requests need it

    def is_shown(other: str) -> bool:
        return answer.log.tenants.get(other) == tenant

    engine = state.config.engine
    limits = Limits(
        answer.ready.max_num_rows or engine.max_num_seqs, engine.step_tokens(answer.ready.max_model_len),
        _max_loras(state), engine.prefill_tokens(),
    )  # fmt: skip
    return explain(answer.log, answer.name, limits, None if tenant is None else is_shown, answer.parts)


async def add_reader(found: Explanation, state: ServerState) -> None:
    """Adds how long the stream waited for its client, where that is known: it is no part of a step."""
    waited_s = state.slow_readers.waited_s(found.request_id)
    if waited_s is None and len(found.request_id) <= MAX_ID_LENGTH:
        answers = await state.ask_peers(f"{READER_TOPIC} {quote(found.request_id, safe='')}")
        waited_s = max((answer for answer in answers if isinstance(answer, float)), default=None)
    if waited_s is not None:
        found.facts["slow_client_ms"] = round(1000 * waited_s, 1)
        found.sentences.append(f"Its stream waited {waited_s:.2f} s in all until its client had read: a slow client.")


async def _reader_answer(state: ServerState, name: str) -> float | None:
    return state.slow_readers.waited_s(unquote(name))


def _max_loras(state: ServerState) -> int:
    """Most adapters of a step; 0 for a server without any."""
    engine = state.config.engine
    return engine.max_loras if engine.enable_lora else 0


def _estimate(found: Explanation, answer: _Answer, state: ServerState) -> None:
    from llmstack_insight.explain import add_estimates_of_engine  # late: few requests need it

    engine = state.config.engine
    settings = {
        "max_num_seqs": answer.ready.max_num_rows or engine.max_num_seqs,
        "max_num_batched_tokens": engine.step_tokens(answer.ready.max_model_len),
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "policy": engine.scheduling_policy,
        "fair_quantum": engine.fair_quantum,
        "long_prefill_token_threshold": engine.long_prefill_token_threshold,
        "max_prefill_tokens": engine.prefill_tokens(),
        "max_itl_ms": engine.max_itl_ms or 0.0,
        "max_itl_steps": engine.itl_steps(),
        "max_num_partial_prefills": engine.max_num_partial_prefills,
        "shorter_prompts_first": engine.shorter_prompts_first,
        "max_loras": _max_loras(state),
    }
    add_estimates_of_engine(found, answer.log, answer.ready, settings, engine.enable_prefix_caching)
