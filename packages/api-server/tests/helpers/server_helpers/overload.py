"""A server whose engine core reports a queue."""

from __future__ import annotations

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.server_state import ServerState
from llmstack_types import SchedulerStats

RATE, NOW_S = 100, 1000.0


def overload(state: ServerState, wait_s: float = 100.0) -> ServerState:
    """Lets the engine core report that it admits `RATE` tokens per second, and that so much waits."""
    state.queue = QueueMonitor(clock=lambda: NOW_S)
    for step in range(11):
        stats = SchedulerStats(
            num_waiting=1, num_waiting_tokens=int(wait_s * RATE) or step < 10, num_admitted_tokens=RATE * step
        )
        state.queue.record(stats, IterationStats(timestamp_s=NOW_S - 10 + step))
    state.queue.first_tokens.num_waiting = 1
    return state
