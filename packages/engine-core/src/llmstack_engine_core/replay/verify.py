"""Proof that these packages decide as the logged run did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmstack_engine_core.replay.derive import DecisionsDifferError, derive_decisions
from llmstack_engine_core.step_log import RecordedRun
from llmstack_engine_core.step_log.decisions import DecisionHash
from llmstack_engine_core.step_log.records import Checkpoint, Event, RequestAdded, StepUpdated


@dataclass(slots=True)
class ReplayReport:
    """What was derived again, and the hash that proves it.

    Attributes:
        num_requests: Added, refused ones included.
        num_tokens: Sampled by the model in the recorded run.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    digest: str = ""


def verify(run: RecordedRun) -> ReplayReport:
    """Derives every decision of the run and compares the running hash at each checkpoint.

    Raises:
        DecisionsDifferError: Something was decided differently; the text says between which steps.
        StepLogError: The log cannot be replayed.
    """
    report, decided, proven_steps = ReplayReport(), DecisionHash(), 0
    scheduler = run.header.build_scheduler()
    for item in derive_decisions(_counted(run, report), scheduler):
        if not isinstance(item, Checkpoint):
            decided.add(item.packed)
            report.num_steps = item.step
        elif item.digest != decided.digest():
            raise DecisionsDifferError(
                f"a decision between steps {proven_steps} and {item.num_steps} is not the recorded one"
            )
        else:
            proven_steps = item.num_steps
    report.digest = decided.digest().hex()
    return report


def _counted(run: RecordedRun, report: ReplayReport) -> Iterator[Event]:
    for event in run.events():
        if isinstance(event, RequestAdded):
            report.num_requests += 1
        elif isinstance(event, StepUpdated):
            report.num_tokens += sum(map(len, event.sampled_token_ids))
        yield event
