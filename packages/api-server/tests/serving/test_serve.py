"""The start before there is an event loop: signals, the model's name, the stages."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.engine_args import EngineArgs
from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import HTTPConfig, ServeConfig, config_from
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import TLSConfig
from llmstack_server.options.secret import Secret, matching_index
from llmstack_server.serving.api_process import ApiProcess
from llmstack_server.serving.api_servers import ApiServers, _Worker
from llmstack_server.serving.launcher import StageTimer, demo_model_path, one_line, resolve_engine_args
from llmstack_server.serving.serve import EarlySignals
from llmstack_server.serving.sockets import bind_socket


@pytest.mark.parametrize("stops", [True, False])
def test_an_early_hangup_stops_a_server_without_certificates(stops: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        signals = EarlySignals(stops_on_hangup=stops)
        with signals.installed():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.is_stop_requested is stops
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_early_signal_is_remembered_and_the_handlers_given_back(number: int):
    signals = EarlySignals()
    before = signal.getsignal(number)
    with signals.installed():
        assert not signals.is_stop_requested
        os.kill(os.getpid(), number)
        assert signals.is_stop_requested
    assert signal.getsignal(number) == before


def test_a_missing_folder_is_named(tmp_path):
    missing = str(tmp_path / "absent")
    with pytest.raises(ServeError, match="absent"):
        resolve_engine_args(ServeConfig(missing, (missing,), engine=EngineArgs(missing)))


def test_without_the_demo_model_a_model_has_to_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llmstack_demo_model", None)
    with pytest.raises(ServeError, match="pip install llmstack-demo-model"):
        demo_model_path()


def test_stages_are_timed_in_order_even_when_they_fail():
    timer = StageTimer()
    with timer.stage("a"):
        pass
    with pytest.raises(ZeroDivisionError), timer.stage("b"):
        raise ZeroDivisionError
    assert list(timer.stage_to_s) == ["a", "b"]
    assert timer.total_s >= sum(timer.stage_to_s.values())


def test_errors_become_one_line():
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_secrets_compare_and_do_not_show():
    keys = (Secret("a"), Secret("b"))
    assert [matching_index(keys, key) for key in (b"a", b"b", b"c", b"")] == [0, 1, None, None]
    assert repr(keys[0]) == "Secret(***)"


def test_an_engine_that_cannot_be_opened_is_said_before_the_http_stack_is_imported():
    def open_engine(timer: StageTimer, stat_loggers: Sequence[Any]) -> Any:
        raise ServeError("There is no model gpt-2")

    async def on_ready(*_: Any) -> None:
        raise AssertionError("there is no engine")

    parser, timer = argparse.ArgumentParser(), StageTimer()
    add_serve_arguments(parser)
    config = config_from(settings_from(parser.parse_args(["gpt-2"]), {}))
    with bind_socket("127.0.0.1", 0) as listener, pytest.raises(ServeError, match="no model gpt-2"):
        asyncio.run(ApiProcess(config, timer, listener, EarlySignals(), open_engine, on_ready).run())
    assert "import HTTP stack" not in timer.stage_to_s


class FakePopen:
    """A process that notes its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize("has_tls", [True, False])
async def test_a_hangup_of_several_processes_reaches_them_where_they_have_certificates(tmp_path: Path, has_tls: bool):
    tls = TLSConfig("cert", "key") if has_tls else None
    popen, (ours, theirs) = FakePopen(), socket.socketpair()
    config = ServeConfig(model="m", served_model_names=("m",), http=HTTPConfig(tls=tls))
    servers = ApiServers(config, StageTimer(), ours, tmp_path)
    servers._workers[0] = _Worker(popen, theirs)  # type: ignore[arg-type]
    outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for _ in range(2):
        servers._on_hangup(outcome)
    assert popen.signals == ([signal.SIGHUP] * 2 if has_tls else [])
    assert outcome.done() is not has_tls
    assert servers._forced_by is None
    ours.close()
    theirs.close()
