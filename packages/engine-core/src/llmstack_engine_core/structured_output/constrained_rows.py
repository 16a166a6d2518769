"""Grammar states and token masks of the constrained rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from llmstack_engine_core.protocols import ConstraintBackend, PendingOutput
from llmstack_engine_core.stages import Execute
from llmstack_types import (
    EngineCoreRequest,
    LLMStackError,
    ModelRunnerOutput,
    NewRequest,
    QuarantinedError,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)
from llmstack_types.token_masks import NO_DRAFTS_MADE

logger = logging.getLogger(__name__)

# `ignore_eos` as `min_tokens`: a text does not end by itself before so many tokens.
_NEVER = 2**31 - 1


def begin(backend: ConstraintBackend, request_id: str, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
    """Lets a backend follow a request that has a constraint.

    Raises:
        InvalidRequestError: The constraint cannot be compiled.
    """
    if params.structured_outputs is not None:
        min_tokens = _NEVER if params.ignore_eos else params.min_tokens
        backend.start(request_id, params.structured_outputs, eos_token_ids, min_tokens)


def past_masks(backend: ConstraintBackend, request: EngineCoreRequest, token_ids: Sequence[int]) -> list[bytes]:
    """The masks that a constrained request had before each of its tokens; token t is bit t % 8 of byte t // 8.

    Raises:
        InvalidRequestError: The constraint cannot be compiled.
        LLMStackError: The tokens cannot be followed: they are not those of the request.
    """
    begin(backend, request.request_id, request.sampling_params, tuple(request.eos_token_ids))
    masks = []
    try:
        for place, token_id in enumerate(token_ids):
            if place:
                backend.accept(request.request_id, [token_ids[place - 1]])
            masks.append(bytes(backend.masks([(request.request_id, ())])))
            if not masks[-1][token_id >> 3] >> (token_id & 7) & 1:
                raise LLMStackError(f"token {token_id} at place {place} is not one that the constraint allows there")
    finally:
        backend.end(request.request_id)
    return masks


@dataclass(frozen=True, slots=True)
class _ConstrainedStep:
    """A step under way. Rows whose grammar has failed end with an error; what they sampled is dropped."""

    pending: PendingOutput
    request_ids: AbstractSet[str]
    failed: AbstractSet[str]

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        failed = self.failed & self.request_ids
        if not failed:
            return output
        sampled = [
            [] if request_id in failed else token_ids
            for request_id, token_ids in zip(output.request_ids, output.sampled_token_ids, strict=True)
        ]
        errors = {**dict.fromkeys(failed, QuarantinedError.NOT_CONSTRAINABLE), **output.errors}
        return replace(output, sampled_token_ids=sampled, errors=errors)


class ConstrainedRows:
    """Advances the grammar of each constrained row by the tokens of the steps.

    The state of a row is derived from the steps alone. A new request carries its tokens, so a preempted request is
    followed from where it stopped; later tokens are those that the runner sampled.

    The runner asks for the masks once its forward pass is launched. Only then are the tokens of the last step read:
    under asynchronous scheduling that step may still be under way when this one begins.

    An error of the backend ends the row at fault. The masks of the other rows stay what they are.

    Attributes:
        num_known_tokens: Request id to the number of tokens that its grammar has accepted, prompt included.
    """

    def __init__(self, backend: Callable[[], ConstraintBackend]) -> None:
        """`backend` is called when there are constrained rows."""
        self.num_known_tokens: dict[str, int] = {}
        self._backend = backend
        self._failed: set[str] = set()
        # Steps whose tokens the grammars have not accepted yet: request id to its index in the step.
        self._unread: list[tuple[dict[str, int], PendingOutput]] = []

    def execute(self, execute: Execute, scheduled: SchedulerOutput) -> PendingOutput:
        """Starts one step by `execute`, with masks if it has constrained rows."""
        if self.num_known_tokens:
            self._forget(scheduled.removed_request_ids)
        for request in scheduled.new_requests:
            if request.sampling_params.structured_outputs is not None:
                self._follow(request)
        indices = self._constrained_rows(scheduled) if self.num_known_tokens else {}
        if not indices:
            return execute(scheduled)
        rows = [scheduled.scheduled_requests[index] for index in indices.values()]

        def make_masks(drafts_made: Mapping[str, Sequence[int]] = NO_DRAFTS_MADE, /) -> TokenMasks:
            return self._masks(rows, drafts_made)

        pending = execute(scheduled, make_masks)
        self._unread.append((indices, pending))
        return _ConstrainedStep(pending, frozenset(indices), self._failed)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self.num_known_tokens.pop(request_id, None) is not None:
                self._end(request_id)
                for indices, _ in self._unread:  # a request that is scheduled again carries those tokens itself
                    indices.pop(request_id, None)

    def _end(self, request_id: str) -> None:
        self._failed.discard(request_id)
        try:
            self._backend().end(request_id)
        except Exception:  # the request has ended, and no other depends on its grammar
            logger.exception("the grammar of request %s could not be ended", request_id)

    def _follow(self, request: NewRequest) -> None:
        params = request.sampling_params
        if params.structured_outputs is None:
            return
        request_id, token_ids = request.request_id, request.token_ids
        self.num_known_tokens[request_id] = len(token_ids)
        try:
            begin(self._backend(), request_id, params, request.eos_token_ids)
            self._backend().accept(request_id, token_ids[request.num_prompt_tokens :])
        except Exception as error:  # noqa: BLE001 (of one row, which must not end the other rows)
            self._fail(request_id, error)

    def _constrained_rows(self, scheduled: SchedulerOutput) -> dict[str, int]:
        followed = self.num_known_tokens
        rows = enumerate(scheduled.scheduled_requests)
        return {row.request_id: index for index, row in rows if row.request_id in followed}

    def _masks(self, rows: Sequence[ScheduledRequest], drafts_made: Mapping[str, Sequence[int]]) -> TokenMasks:
        self._read_last_steps()
        sampling = [row for row in rows if row.request_id not in self._failed and self._samples(row)]
        if drafts_made:
            sampling = [
                row._replace(draft_token_ids=drafts_made.get(row.request_id, row.draft_token_ids)) for row in sampling
            ]
        try:
            bits = self._backend().masks([(row.request_id, row.draft_token_ids) for row in sampling])
        except Exception:  # of some row, which is found by asking for each alone
            logger.exception("the masks of a step could not be computed together")
            return self._masks_one_by_one(sampling)
        return TokenMasks([row.request_id for row in sampling], bits)

    def _masks_one_by_one(self, rows: Sequence[ScheduledRequest]) -> TokenMasks:
        request_ids, bits = [], bytearray()
        for row in rows:
            try:
                bits += self._backend().masks([(row.request_id, row.draft_token_ids)])
            except Exception as error:  # noqa: BLE001 (of one row, which must not end the other rows)
                self._fail(row.request_id, error)
            else:
                request_ids.append(row.request_id)
        return TokenMasks(request_ids, bits)

    def _samples(self, row: ScheduledRequest) -> bool:
        """Whether the row reaches the last token that is known."""
        end = row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids)
        return end == self.num_known_tokens[row.request_id]

    def _read_last_steps(self) -> None:
        """Accepts the tokens of the unread steps, of the rows that are still followed."""
        unread, self._unread = self._unread, []
        for indices, pending in unread:
            self._accept(indices, pending.result())

    def _accept(self, indices: Mapping[str, int], output: ModelRunnerOutput) -> None:
        for request_id, index in indices.items():
            token_ids = output.sampled_token_ids[index]
            if token_ids and request_id not in self._failed:
                try:
                    self._backend().accept(request_id, token_ids)
                except Exception as error:  # noqa: BLE001 (of one row, which must not end the other rows)
                    self._fail(request_id, error)
                self.num_known_tokens[request_id] += len(token_ids)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Lets a request end with this step."""
        logger.error("the grammar of request %s failed", request_id, exc_info=error)
        self._failed.add(request_id)
