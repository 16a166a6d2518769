"""Observers of an engine core: hooks, records, logs and reports."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack_engine_core.block_residency import BlockResidency
from llmstack_engine_core.cache_news import CacheNews
from llmstack_engine_core.events import EventBus, StepRecorder
from llmstack_engine_core.profiles import NOT_ENABLED, StepProfiles
from llmstack_engine_core.protocols import ShadowSource
from llmstack_engine_core.stages import Operations
from llmstack_step_log import DeferredLog
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    ShadowReport,
    StepPhases,
    StepRecording,
)


def numerics_of(ready: EngineReady) -> dict[str, object]:
    """The facts that the bits of results depend on, for a step log."""
    return {"numeric_contract": ready.numeric_contract_id, "backends": dict(ready.backends)}


@dataclass(frozen=True, slots=True)
class Observers:
    """Follow an engine core, and change nothing that it decides or computes. Used by the engine core's thread.

    Attributes:
        events: The states of requests and the steps, for the front end and for hooks.
        recorder: Keeps the last steps; None without. It is among the hooks of `events`, as `residency` and `profiles`.
        residency: Measures how long blocks stay in the cache; None without.
        profiles: Records what the runner computes; None refuses that.
        step_log: The log that the scheduler writes its calls to; None without. Closed at the end.
        shadow: Follows `step_log`, and reports; None without.
        cache_news: Follows the prefix cache; None without prefix caching.
        log_stats: Whether outputs have statistics, events and reports.
    """

    events: EventBus
    recorder: StepRecorder | None = None
    residency: BlockResidency | None = None
    profiles: StepProfiles | None = None
    step_log: DeferredLog | None = None
    shadow: ShadowSource | None = None
    cache_news: CacheNews | None = None
    log_stats: bool = True

    def operations(self) -> Operations:
        """The control operations on the step log and on profiles."""
        log, profiles = self.step_log, self.profiles
        return {
            Control.STEP_LOG: lambda: b"" if log is None else log.dump(),
            Control.START_PROFILE: lambda: NOT_ENABLED if profiles is None else profiles.start(),
            Control.STOP_PROFILE: lambda: "" if profiles is None else profiles.stop(),
        }

    def note_request(self, request: EngineCoreRequest) -> None:
        """A request is accepted."""
        if self.recorder is not None:
            self.recorder.note_request(request)

    def note_returns(self, scheduler: Scheduler) -> None:
        """Notes the sessions that have gone on in a step."""
        if self.recorder is not None:
            self.recorder.note_returns(scheduler.take_returns())

    def recent_steps(self, now_s: float, after_step: int) -> StepRecording:
        """The last steps after `after_step`; none without a recorder."""
        return StepRecording(now_s, (), ()) if self.recorder is None else self.recorder.read(now_s, after_step)

    def read_cache(self) -> None:
        """The prefix cache may have changed."""
        if self.cache_news is not None:
            self.cache_news.read()

    def take_shadow_report(self) -> ShadowReport | None:
        """The report of the shadow scheduler since the last call; None if there is none."""
        return None if self.shadow is None else self.shadow.take_report()

    def complete(
        self, outputs: list[EngineCoreOutput], step_outputs: EngineCoreOutputs, phases: StepPhases | None
    ) -> EngineCoreOutputs:
        """`outputs`, and what there is to report after the step of `step_outputs`."""
        if self.cache_news is not None and self.cache_news.is_followed:
            self.cache_news.read()
        events = self.events.take() if self.events.unsent else ()
        if not self.log_stats:
            return EngineCoreOutputs(outputs, step_outputs.timestamp_s)
        return EngineCoreOutputs(
            outputs, step_outputs.timestamp_s, step_outputs.scheduler_stats, events, phases,
            evictions=() if self.residency is None else self.residency.take(),
            shadow=None if self.shadow is None else self.shadow.take_report(),
        )  # fmt: skip

    def follow_weights(self, ready: EngineReady) -> None:
        """The model runner has other weights."""
        if self.step_log is not None:
            self.step_log.change_numerics(numerics_of(ready))

    def close(self) -> None:
        """Ends the shadow, the log, the publisher of the cache and the profile. Idempotent."""
        if self.shadow is not None:
            self.shadow.close()
        if self.step_log is not None:
            self.step_log.close()
        if self.cache_news is not None:
            self.cache_news.close()
        if self.profiles is not None:
            self.profiles.stop()
