"""Around a model runner: follows the constrained rows, and hands it the masks of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmstack_engine_core.protocols import ConstraintBackend, ModelRunner, PendingOutput
from llmstack_types import (
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)

# Before so many tokens no text ends by itself: `ignore_eos` in terms of `min_tokens`.
_NEVER = 2**31 - 1


class ConstrainedRunner:
    """Satisfies `ModelRunner` by standing around one. A step without constrained rows is passed on as it is.

    What a row has said is derived from the steps alone: a new request brings its tokens, so that one which comes back
    after a preemption is followed from there; later tokens are those that the runner sampled.

    The runner asks for the masks once its forward pass is launched. Only then are the tokens of the last step looked
    at, which under asynchronous scheduling may still be under way when this one begins.
    """

    def __init__(self, runner: ModelRunner, backend: Callable[[], ConstraintBackend]) -> None:
        """`backend` is called when there are constrained rows."""
        self._runner = runner
        self._backend = backend
        self._num_known_tokens: dict[str, int] = {}
        self._behind: list[tuple[dict[str, int], PendingOutput]] = []  # request id to its index in the step

    def execute_model(
        self, scheduled: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        """Starts one step; masks that others have made are refused.

        Raises:
            ValueError: `token_masks` is given.
        """
        if token_masks is not None:
            raise ValueError("the masks of constrained rows are made here")
        if self._num_known_tokens:
            self._forget(scheduled.removed_request_ids)
        for request in scheduled.new_requests:
            if request.sampling_params.structured_outputs is not None:
                self._follow(request)
        indices = self._constrained_rows(scheduled) if self._num_known_tokens else {}
        if not indices:
            return self._runner.execute_model(scheduled)
        rows = [scheduled.scheduled_requests[index] for index in indices.values()]
        pending = self._runner.execute_model(scheduled, lambda: self._masks(rows))
        self._behind.append((indices, pending))
        return pending

    def load_model(self) -> None:
        """As the runner."""
        self._runner.load_model()

    def kv_cache_spec(self) -> KVCacheSpec:
        """As the runner."""
        return self._runner.kv_cache_spec()

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """As the runner."""
        return self._runner.available_kv_bytes(is_size_given=is_size_given)

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """As the runner."""
        self._runner.initialize_kv_cache(num_blocks, num_host_blocks)

    def backends(self) -> Mapping[str, str]:
        """As the runner."""
        return self._runner.backends()

    def sleep(self, level: int) -> None:
        """As the runner."""
        self._runner.sleep(level)

    def wake_up(self) -> None:
        """As the runner."""
        self._runner.wake_up()

    def shutdown(self) -> None:
        """As the runner."""
        self._runner.shutdown()

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._num_known_tokens.pop(request_id, None) is not None:
                self._backend().end(request_id)
                for indices, _ in self._behind:  # should it come back, it brings those tokens itself
                    indices.pop(request_id, None)

    def _follow(self, request: NewRequest) -> None:
        params = request.sampling_params
        if params.structured_outputs is None:
            return
        request_id, token_ids = request.request_id, request.token_ids
        min_tokens = _NEVER if params.ignore_eos else params.min_tokens
        self._backend().start(request_id, params.structured_outputs, request.eos_token_ids, min_tokens)
        self._backend().accept(request_id, token_ids[request.num_prompt_tokens :])
        self._num_known_tokens[request_id] = len(token_ids)

    def _constrained_rows(self, scheduled: SchedulerOutput) -> dict[str, int]:
        followed = self._num_known_tokens
        rows = enumerate(scheduled.scheduled_requests)
        return {row.request_id: index for index, row in rows if row.request_id in followed}

    def _masks(self, rows: Sequence[ScheduledRequest]) -> TokenMasks:
        self._catch_up()
        sampling = [row for row in rows if self._samples(row)]
        bits = self._backend().masks([(row.request_id, row.draft_token_ids) for row in sampling])
        return TokenMasks([row.request_id for row in sampling], bits)

    def _samples(self, row: ScheduledRequest) -> bool:
        """Whether the row reaches the last token that is known."""
        end = row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids)
        return end == self._num_known_tokens[row.request_id]

    def _catch_up(self) -> None:
        """Takes over the tokens of the steps since, of the rows that have not left in the meantime."""
        behind, self._behind = self._behind, []
        for indices, pending in behind:
            self._take_over(indices, pending.result())

    def _take_over(self, indices: Mapping[str, int], output: ModelRunnerOutput) -> None:
        for request_id, index in indices.items():
            token_ids = output.sampled_token_ids[index]
            if token_ids:
                self._backend().accept(request_id, token_ids)
                self._num_known_tokens[request_id] += len(token_ids)
