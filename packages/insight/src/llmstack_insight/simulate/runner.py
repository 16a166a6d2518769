"""A stand-in for the model runner: it samples a token where a real one would."""

from __future__ import annotations

from llmstack_types import ModelRunnerOutput, SchedulerOutput

OUTPUT_TOKEN_ID = 0


class TraceRunner:
    """A model runner without a model; it knows of each row how many tokens it has."""

    def __init__(self) -> None:
        self._num_known_tokens: dict[str, int] = {}

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """The results of one simulated step."""
        known = self._num_known_tokens
        for request_id in scheduled.removed_request_ids:
            known.pop(request_id, None)
        for request in scheduled.new_requests:
            known[request.request_id] = len(request.token_ids)
        request_ids: list[str] = []
        sampled: list[list[int]] = []
        for row in scheduled.scheduled_requests:
            request_id, end = row[0], row[1] + row[2]
            request_ids.append(request_id)
            if end == known[request_id]:
                known[request_id] = end + 1
                sampled.append([OUTPUT_TOKEN_ID])
            else:
                sampled.append([])
        return ModelRunnerOutput(request_ids, sampled)
