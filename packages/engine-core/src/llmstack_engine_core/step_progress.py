"""Steps of an engine core, reported as its progress."""

from __future__ import annotations

from typing import cast

from llmstack_engine_core.progress import SharedProgress
from llmstack_engine_core.protocols import EventHook, ReportingRunner
from llmstack_types import EngineCoreOutputs, SchedulerOutput, StepRecord


class StepTimes:
    """Durations of steps by number of tokens, in powers of two; the watchdog for hanging steps uses them."""

    def __init__(self, unknown_s: float) -> None:
        """`unknown_s`: The time limit of a step larger than all measured ones: the first ones compile and capture."""
        self._unknown_s = unknown_s
        self._class_to_s: dict[int, float] = {}

    def expected_s(self, num_tokens: int) -> float:
        """The time of a step of so many tokens."""
        size = num_tokens.bit_length()
        known = self._class_to_s.get(size)
        if known is not None:
            return known
        larger = [seconds for other, seconds in self._class_to_s.items() if other > size]
        return min(larger, default=self._unknown_s)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; slower ones count at once, faster ones by and by."""
        size = num_tokens.bit_length()
        last_s = self._class_to_s.get(size, 0.0)
        self._class_to_s[size] = max(seconds, last_s + (seconds - last_s) / 16)


class ProgressHook(EventHook):
    """Reports each step that computes tokens, or parts of media, as progress."""

    def __init__(self, progress: SharedProgress, unknown_s: float) -> None:
        self._progress = progress
        self._unknown_s = unknown_s
        self._times = StepTimes(unknown_s)

    def listen_to(self, runner: object) -> None:
        """Lets a runner that can report progress within its steps; a step may then pause for a tenth of the time only.

        To be called when the engine core is ready: its progress begins then.
        """
        if hasattr(runner, "report_progress_to"):
            cast(ReportingRunner, runner).report_progress_to(self._progress.report)
            self._times = StepTimes(self._unknown_s / 10)

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step without tokens or work of an encoder is no progress: who schedules nothing for ever is stuck."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens or scheduled.encoder_work:
            self._progress.advance(self._times.expected_s(num_tokens))

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Learns what the step took."""
        num_tokens = sum(row.num_scheduled_tokens for row in record.rows)
        if num_tokens:
            self._times.note(num_tokens, sum(record.phases))
            self._progress.advance()
