"""Proof that these packages decide as the logged run did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmstack_step_log import Run
from llmstack_step_log.records import Checkpoint, Event, RequestAdded, StepUpdated
from llmstack_step_log.replay.derive import derive_decisions, proven


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay, and the hash that proves it.

    Attributes:
        num_requests: Added, refused ones included.
        num_tokens: Sampled by the model in the recorded run.
        is_closed: Whether the run ended in good order.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    digest: str = ""
    is_closed: bool = False


def verify(run: Run) -> ReplayReport:
    """Derives every decision of the run and compares the running hash at each checkpoint.

    Raises:
        DecisionsDifferError: Something was decided differently; the text says between which steps.
        StepLogError: The log cannot be replayed.
    """
    start, report = run.start, ReplayReport()
    scheduler = run.header.build_scheduler() if start is None else start.build_scheduler(run.header)
    for decision in proven(derive_decisions(_counted(run, report), scheduler, start), start):
        report.num_steps = decision.step
    return report


def _counted(run: Run, report: ReplayReport) -> Iterator[Event]:
    for event in run.events():
        if isinstance(event, RequestAdded):
            report.num_requests += 1
        elif isinstance(event, StepUpdated):
            report.num_tokens += sum(map(len, event.sampled_token_ids))
        elif isinstance(event, Checkpoint):
            report.digest, report.is_closed = event.digest.hex(), event.is_closed
        yield event
