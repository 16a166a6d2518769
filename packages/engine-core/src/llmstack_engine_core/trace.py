"""Trace lines of requests: `[TRACE] (module) message`, on standard error.

The module is loaded only with `--trace`. Lines hold ids and counts, never what users wrote.
"""

from __future__ import annotations

import sys

from llmstack_engine_core.protocols import EventHook
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestEvent,
    ScheduledRequest,
    SchedulerOutput,
    StepRecord,
)


def trace_line(module: str, message: str) -> None:
    """Writes one line at once, so that those of several processes stay whole and in order."""
    sys.stderr.write(f"[TRACE] ({module}) {message}\n")
    sys.stderr.flush()


class TraceHook(EventHook):
    """The engine core's lines: states, steps and their rows."""

    def on_status(self, event: RequestEvent) -> None:
        """Prints the request and the state that it enters."""
        trace_line("scheduler", f"{event.request_id}: {event.status.name}")

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Prints the work of the step, row by row."""
        if scheduled.is_empty():
            return
        num_tokens, rows = scheduled.total_num_scheduled_tokens, scheduled.scheduled_requests
        trace_line("scheduler", f"step {scheduled.step}: {num_tokens} tokens of {len(rows)} requests")
        new_ids = {request.request_id: request.num_prompt_tokens for request in scheduled.new_requests}
        for row in rows:
            trace_line("model_runner", f"{row.request_id}: {_describe(row, new_ids.get(row.request_id))}")

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Prints the outputs, the duration and the load after a step."""
        for output in outputs.outputs:
            trace_line("engine_core", f"{output.request_id}: {_describe_output(output)}")
        if not record.rows:
            return
        stats, phases = record.stats, record.phases
        trace_line(
            "engine_core",
            f"step {stats.step} done in {1000 * sum(phases):.1f} ms (model {1000 * phases.execute_s:.1f}): "
            f"{stats.num_running} running, {stats.num_waiting} waiting, "
            f"{stats.num_blocks - stats.num_free_blocks} of {stats.num_blocks} blocks",
        )


def _describe(row: ScheduledRequest, num_prompt_tokens: int | None) -> str:
    start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
    kind = "decode" if num_prompt_tokens is None and row.num_scheduled_tokens == 1 else "prefill"
    drafts = f", {len(row.draft_token_ids)} of them drafts" if row.draft_token_ids else ""
    return f"{kind} of tokens {start} to {end}{drafts}, {len(row.new_block_ids)} new blocks"


def _describe_output(output: EngineCoreOutput) -> str:
    what = "a vector" if output.pooled is not None else f"{len(output.new_token_ids)} tokens"
    return what if output.finish_reason is None else f"{what}, the end: {output.finish_reason}"
