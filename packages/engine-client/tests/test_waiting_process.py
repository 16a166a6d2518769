"""A process that is started before its configuration is known."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from llmstack_engine_client import make_client
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_client.processes.waiting_process import early_process, start_waiting_process
from llmstack_engine_core import EngineConfig
from llmstack_types import ModelRunnerConfig

CONFIG = EngineConfig(ModelRunnerConfig("echo?"), runner="echo", log_level="CRITICAL", shutdown_grace_s=3.0)


def children() -> set[int]:
    """The processes that this one has started and not yet waited for."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_the_first_launch_takes_the_early_process_and_the_second_another_one() -> None:
    before = children()
    with early_process("echo"):
        (early,) = children() - before
        first = launch_engine_process(CONFIG)
        second = launch_engine_process(CONFIG)
    try:
        assert first.pid == early
        assert second.pid != early
        assert first.is_alive
    finally:
        first.stop()
        second.stop()


def test_an_early_process_that_is_not_needed_ends_with_the_block() -> None:
    before = children()
    with early_process("echo"):
        assert len(children() - before) == 1
    assert children() <= before


def test_an_early_process_that_has_ended_is_replaced() -> None:
    before = children()
    with early_process("echo"):
        (early,) = children() - before
        os.kill(early, signal.SIGKILL)
        os.waitid(os.P_PID, early, os.WEXITED | os.WNOWAIT)
        other = start_waiting_process()
    assert other.popen.pid != early
    other.end()
    assert children() <= before


@pytest.mark.parametrize("imported", ["echo", "missing.module:Runner"])
def test_it_serves_whatever_it_has_imported(imported: str) -> None:
    with early_process(imported):
        client = make_client(CONFIG, multiprocess=True)
    try:
        client.wait_until_ready()
    finally:
        client.shutdown()
