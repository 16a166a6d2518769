"""A start order that arrives while its process imports the runner."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from llmstack_engine_core import EngineConfig
from llmstack_engine_core.early_order import EarlyOrder
from llmstack_engine_core.start_order import StartOrder, send_start_order
from llmstack_types import EngineStartError, ModelRunnerConfig


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[ModelRunnerConfig]:
    found: SimpleQueue[ModelRunnerConfig] = SimpleQueue()
    monkeypatch.setitem(sys.modules, "llmstack_model_runner.touch_ahead", SimpleNamespace(start_touching=found.put))
    return found


def order(runner: str, *, is_spare: bool = False) -> StartOrder:
    return StartOrder(EngineConfig(ModelRunnerConfig("model"), runner=runner), Path("/tmp/x"), 1, "ipc://x", is_spare)


def test_memory_is_touched_before_anyone_waits_for_the_order(
    ends: tuple[socket.socket, socket.socket], touched: SimpleQueue[ModelRunnerConfig]
) -> None:
    early = EarlyOrder(ends[1], ["default"])
    send_start_order(ends[0], order("default"))
    assert touched.get(timeout=20) == ModelRunnerConfig("model")
    assert early.wait() == order("default")
    assert touched.empty()


def test_a_runner_that_is_not_imported_yet_touches_memory_when_the_order_is_known(
    ends: tuple[socket.socket, socket.socket], touched: SimpleQueue[ModelRunnerConfig]
) -> None:
    send_start_order(ends[0], order("default"))
    assert EarlyOrder(ends[1], []).wait() == order("default")
    assert touched.get_nowait() == ModelRunnerConfig("model")


@pytest.mark.parametrize(("runner", "is_spare"), [("default", True), ("echo", False), ("package:Runner", False)])
def test_a_spare_and_other_runners_touch_nothing(
    ends: tuple[socket.socket, socket.socket], touched: SimpleQueue[ModelRunnerConfig], runner: str, is_spare: bool
) -> None:
    send_start_order(ends[0], order(runner, is_spare=is_spare))
    assert EarlyOrder(ends[1], []).wait() == order(runner, is_spare=is_spare)
    assert touched.empty()


def test_the_end_of_the_sender_is_an_error_of_the_thread_that_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    early = EarlyOrder(ends[1], [])
    ends[0].close()
    with pytest.raises(EngineStartError, match="ended before"):
        early.wait()


def test_a_runner_that_is_not_installed_touches_nothing(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llmstack_model_runner.touch_ahead", None)
    send_start_order(ends[0], order("default"))
    assert EarlyOrder(ends[1], ["default"]).wait() == order("default")
