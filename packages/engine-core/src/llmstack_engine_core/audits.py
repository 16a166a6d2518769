"""Audits of the prefix cache: a share of its hits is computed again."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from llmstack_engine_core.admission import AUDIT_MARK
from llmstack_engine_core.protocols import PendingOutput
from llmstack_engine_core.stages import AuditStage, Execute
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.001
TOLERANCE: Final = 0.25
"""Two log-probabilities may differ by so much where equal bits are not promised."""
MAX_NUM_WAITING: Final = 16
"""Hits that wait for their audit; those that come then are not audited."""
_NUM_LOGPROBS: Final = 8
_MAX_CORE_SHARE: Final = 0.02
_MAX_FREE_SHARE: Final = 1 / 8
"""An audit takes at most so much of the blocks that no request holds: it may evict what is cached there."""


class Audits(AuditStage):
    """The audits of one engine core, one at a time and only while it has no request.

    An audit is two requests of the scheduler with the same tokens. The first takes the hit, the second computes every
    token. Both give the log-probabilities of the next token, which depend on all that the cache holds for the prefix:
    keys, values and states. If they differ, the second one's row counts as failed, so the scheduler forgets the prefix.
    The step log has both requests and that failure, and its replay needs nothing else.

    Attributes:
        num_agreeing: Counter of audits that found what was cached.
        num_differing: Counter of audits that found something else.
        has_results: Whether an audit has ended.
    """

    def __init__(
        self, share: float, tolerance: float, scheduler: Scheduler, ready: EngineReady, clock: Callable[[], float],
        *, max_num_tokens: int, distrust: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Makes the audits of `share` of the requests, in (0, 1], of those that have a hit.

        `tolerance`: By how much log-probabilities may differ; 0 asks for equal bits.
        `max_num_tokens`: The tokens of one step; of a longer hit the first ones are computed again.
        `distrust`: Called when one differs: what was copied out of the cache may be wrong too.
        """
        self.num_agreeing = self.num_differing = 0
        self.has_results = False
        self._interval = max(round(1 / share), 1)
        self._tolerance = tolerance
        self._scheduler = scheduler
        self._ready = ready
        self._clock, self._distrust = clock, distrust
        self._max_num_tokens = max_num_tokens // ready.block_size * ready.block_size
        self._num_requests = self._num_audits = 0
        self._watched: dict[str, EngineCoreRequest] = {}  # those that have not been scheduled
        self._waiting: deque[tuple[list[int], str]] = deque()
        self._audit: _Audit | None = None
        self._next_s = 0.0

    @property
    def is_in_use(self) -> bool:
        """Whether an audit is under way, or a request is about to be scheduled whose hit would be audited."""
        return bool(self._watched) or self._audit is not None

    def note_request(self, request: EngineCoreRequest) -> None:
        """A request is accepted: it ends an audit under way, and its own hit may be audited."""
        self.interrupt()
        self._num_requests += 1
        if self._num_requests % self._interval or len(self._waiting) + len(self._watched) >= MAX_NUM_WAITING:
            return
        has_tokens_only = request.lora_name is None and not request.media
        if has_tokens_only and not request.sampling_params.use_beam_search:
            self._watched[request.request_id] = request

    def begin(self) -> None:
        """Begins an audit if one waits and is due; the engine core has no request."""
        if not self._waiting or self._audit is not None or self._clock() < self._next_s:
            return
        token_ids, salt = self._waiting.popleft()
        if not self._has_room(len(token_ids)):
            return
        self._audit = _Audit(token_ids, salt, self._clock())
        self._add(self._audit, prompt_logprobs=None)

    def interrupt(self) -> None:
        """Ends the audit under way; it is made again later."""
        if self._audit is not None:
            self._scheduler.abort_requests([self._audit.request_id])
            self._waiting.appendleft((self._audit.token_ids, self._audit.salt))
            self._end()

    def execute(self, execute: Execute, scheduled: SchedulerOutput, *token_masks: object) -> PendingOutput:
        """Starts a step, and compares its results for an audit that knows those of the hit."""
        if self._watched and scheduled.new_requests:
            self._look_for_hits(scheduled)
        pending = execute(scheduled, *token_masks)
        audit = self._audit
        return pending if audit is None or audit.of_hit is None else _Compared(pending, audit, self._tolerance)

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The outputs without that of an audit, which goes on or ends."""
        audit = self._audit
        if audit is None:
            return step_outputs
        others = [output for output in step_outputs.outputs if output.request_id != audit.request_id]
        for output in step_outputs.outputs:
            if output.request_id == audit.request_id:
                self._advance(audit, output)
        return step_outputs._replace(outputs=others)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended before they were scheduled."""
        for request_id in request_ids:
            self._watched.pop(request_id, None)

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with the counters of audits."""
        return stats._replace(num_agreeing_audits=self.num_agreeing, num_differing_audits=self.num_differing)

    def _has_room(self, num_tokens: int) -> bool:
        stats = self._scheduler.stats()
        num_free_tokens = self._ready.num_kv_tokens * stats.num_free_blocks / max(stats.num_blocks, 1)
        return num_tokens <= num_free_tokens * _MAX_FREE_SHARE

    def _look_for_hits(self, scheduled: SchedulerOutput) -> None:
        for row in scheduled.scheduled_requests:
            request = self._watched.pop(row.request_id, None)
            if request is not None and row.num_computed_tokens:
                num_tokens = min(row.num_computed_tokens, self._max_num_tokens) + 1  # a lookup leaves the last one
                token_ids = [*request.prompt_token_ids, *request.output_token_ids][:num_tokens]
                self._waiting.append((token_ids, request.cache_salt))

    def _add(self, audit: _Audit, *, prompt_logprobs: int | None) -> None:
        """Adds a request of the audit under way; one that reports about its prompt takes no hit."""
        self._num_audits += 1
        audit.request_id = f"{AUDIT_MARK}{self._num_audits}"
        params = SamplingParams(
            temperature=0.0, seed=0, ignore_eos=True, max_tokens=1, prompt_logprobs=prompt_logprobs,
            logprobs=min(_NUM_LOGPROBS, self._ready.vocab_size),
        )  # fmt: skip
        request = EngineCoreRequest(audit.request_id, audit.token_ids, params, cache_salt=audit.salt)
        try:
            self._scheduler.add_request(request)
        except InvalidRequestError:  # the cache has become too small for it, or a client has taken the id
            self._end()

    def _advance(self, audit: _Audit, output: EngineCoreOutput) -> None:
        is_failed = output.finish_reason is FinishReason.ERROR
        if audit.of_hit is None and not is_failed and output.logprobs and output.num_cached_tokens > 0:
            audit.of_hit = output.logprobs[0]
            self._add(audit, prompt_logprobs=0)
            return
        if audit.differs:
            self.num_differing += 1
            self._distrust()
            logger.error(
                "the prefix cache held other values for %d tokens than were computed again: they are found no longer",
                len(audit.token_ids) - 1,
            )
        elif audit.of_hit is not None and not is_failed:
            self.num_agreeing += 1
        self.has_results = bool(self.num_agreeing or self.num_differing)
        self._end()

    def _end(self) -> None:
        audit, self._audit = self._audit, None
        if audit is not None:
            now_s = self._clock()
            self._next_s = now_s + (now_s - audit.begun_s) * (1 / _MAX_CORE_SHARE - 1)


@dataclass(slots=True)
class _Audit:
    """One audit.

    Attributes:
        token_ids: Those of the hit, and the next one.
        request_id: Its request in the scheduler.
        of_hit: What followed the tokens when they were found; None before that is known.
        differs: Something else followed when they were computed.
    """

    token_ids: list[int]
    salt: str
    begun_s: float
    request_id: str = ""
    of_hit: TokenLogprobs | None = None
    differs: bool = False


class _Compared:
    """A step under way that computes the tokens of an audit again."""

    def __init__(self, pending: PendingOutput, audit: _Audit, tolerance: float) -> None:
        self._pending = pending
        self._audit = audit
        self._tolerance = tolerance

    def result(self) -> ModelRunnerOutput:
        """The results; the row fails if other log-probabilities follow than those of the hit."""
        output, audit = self._pending.result(), self._audit
        entries, of_hit = output.logprobs.get(audit.request_id), audit.of_hit
        if not entries or of_hit is None or is_close(entries[0], of_hit, self._tolerance):
            return output
        audit.differs = True
        return replace(output, errors={**output.errors, audit.request_id: "The cached prefix differs."})


def is_close(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Whether log-probabilities have equal bits or, with a tolerance, differ by at most that for tokens of both."""
    if not tolerance:
        return one.token_ids == other.token_ids and _bits(one) == _bits(other)
    others = dict(zip(other.token_ids, other.logprobs, strict=True))
    pairs = [(value, others[name]) for name, value in zip(one.token_ids, one.logprobs, strict=True) if name in others]
    return bool(pairs) and all(abs(first - second) <= tolerance for first, second in pairs)


def _bits(entry: TokenLogprobs) -> bytes:
    return struct.pack(f"<{len(entry.logprobs)}d", *entry.logprobs)
