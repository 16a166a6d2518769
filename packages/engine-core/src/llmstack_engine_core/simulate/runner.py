"""What stands in for the model: it samples some token where a real one would, and adds up the work of a step."""

from __future__ import annotations

from llmstack_engine_core.simulate.cost_model import StepWork
from llmstack_types import ModelRunnerOutput, SchedulerOutput

OUTPUT_TOKEN_ID = 0


class TraceRunner:
    """A model runner without a model; it knows of each row how many tokens it has."""

    def __init__(self) -> None:
        self._num_known_tokens: dict[str, int] = {}

    def execute(self, scheduled: SchedulerOutput) -> tuple[ModelRunnerOutput, StepWork]:
        """One step's results, and what it had to compute."""
        known = self._num_known_tokens
        for request_id in scheduled.removed_request_ids:
            known.pop(request_id, None)
        for request in scheduled.new_requests:
            known[request.request_id] = len(request.token_ids)
        request_ids: list[str] = []
        sampled: list[list[int]] = []
        num_prefill_tokens = num_decode_rows = num_context_tokens = 0
        for row in scheduled.scheduled_requests:
            request_id, num_scheduled = row[0], row[2]
            end = row[1] + num_scheduled
            num_context_tokens += end
            if num_scheduled == 1:
                num_decode_rows += 1
            else:
                num_prefill_tokens += num_scheduled
            request_ids.append(request_id)
            if end == known[request_id]:
                known[request_id] = end + 1
                sampled.append([OUTPUT_TOKEN_ID])
            else:
                sampled.append([])
        work = StepWork(num_prefill_tokens, num_decode_rows, num_context_tokens)
        return ModelRunnerOutput(request_ids, sampled), work
