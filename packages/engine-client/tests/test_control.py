"""Control operations: every layer knows all of them, and a failed or foreign answer ends the client."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_engine_client.clients.inproc import InprocClient
from llmstack_engine_client.clients.mailbox import Mailbox
from llmstack_engine_client.replicas.balanced import MERGES
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.messages.control import SIGNATURES, ControlResult
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_types import Control, EngineDeadError, ModelRunnerConfig, SchedulerStats, StepRecording

ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    Control.RECENT_STEPS: (0,),
    Control.SLEEP: (1,),
    Control.LOAD_ADAPTER: ("a@d.1", "folder"),
    Control.UNLOAD_ADAPTER: ("a@d.1",),
    Control.SET_LOG_LEVEL: ("warning",),
    Control.UPDATE_WEIGHTS: ("folder",),
    Control.RELEASE_SESSIONS: ("tenant", "session"),
}
RESULT_TYPES = {
    Control.LOAD_ADAPTER: str,
    Control.START_PROFILE: str,
    Control.UPDATE_WEIGHTS: tuple,
    Control.RELEASE_SESSIONS: tuple,
    Control.STOP_PROFILE: str,
    Control.STATS: SchedulerStats,
    Control.RECENT_STEPS: StepRecording,
    Control.STEP_LOG: bytes,
    Control.SLEEP_LEVEL: int,
}


def config() -> EngineConfig:
    return EngineConfig(ModelRunnerConfig("echo?"), runner="echo")


@pytest.mark.parametrize("operation", SIGNATURES, ids=lambda operation: operation.name)
def test_an_engine_core_answers_every_operation_with_a_value_of_its_type(operation: Any) -> None:
    core = build_engine_core(config())
    value = core.call(operation, *ARGUMENTS.get(operation, ()))
    assert type(value) is RESULT_TYPES.get(operation, bool)
    assert core.is_stopping is (operation is Control.SHUTDOWN)
    core.shutdown()


def test_the_results_of_several_engine_cores_are_combined_for_every_operation() -> None:
    assert {operation.merged for operation in SIGNATURES} == set(MERGES)
    load = MERGES[Control.LOAD_ADAPTER.merged]
    assert [load(["loaded", other, "loaded"]) for other in ("loaded", "loading", "It is damaged.")] == [
        "loaded",
        "loading",
        "It is damaged.",
    ]
    assert MERGES[Control.START_PROFILE.merged](["", "No."]) == "No."
    assert MERGES[Control.STOP_PROFILE.merged](["a", "", "b\nc"]) == "a\nb\nc"
    assert MERGES[Control.RELEASE_SESSIONS.merged]([(1, 64), (0, 0), (2, 16)]) == (3, 80)


def test_an_operation_that_fails_ends_an_engine_core_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InprocClient(config())
    client.wait_until_ready()
    assert client.call(Control.SLEEP, 2)
    assert client.call(Control.SLEEP_LEVEL) == 2
    monkeypatch.setattr(EchoModelRunner, "wake_up", lambda runner: runner.weights_are_gone)
    with pytest.raises(EngineDeadError, match="AttributeError in wake_up"):
        client.call(Control.WAKE_UP)
    assert client.is_dead
    client.shutdown()


def test_an_answer_to_another_operation_counts_as_the_end_of_the_engine_core() -> None:
    mailbox = Mailbox()
    call_id = mailbox.begin_call(Control.STATS)
    mailbox.take(ControlResult(call_id, Control.WAKE_UP, True))
    assert mailbox.is_call_over(call_id)
    with pytest.raises(EngineDeadError, match="answered stats with a result of wake_up"):
        mailbox.result_of(call_id)


def test_the_answer_to_a_call_whose_caller_was_cancelled_is_dropped() -> None:
    mailbox = Mailbox()
    call_id = mailbox.begin_call(Control.STATS)
    mailbox.end_call(call_id)
    mailbox.take(ControlResult(call_id, Control.STATS, SchedulerStats()))
    assert mailbox.results == {}
    assert mailbox.death is None
