"""Engine cores that another process watches: one that a signal ends is replaced, and its clients learn the cause."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from llmstack_engine_client.processes.engines import EngineProcesses
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_core import EngineConfig
from llmstack_types import ModelRunnerConfig


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)


class Watched:
    """One engine core, with what its supervisor says."""

    def __init__(self, options: str) -> None:
        config = EngineConfig(
            ModelRunnerConfig(f"echo?{options}"), runner="echo", log_level="CRITICAL", shutdown_grace_s=3.0,
            max_restarts=3,
        )  # fmt: skip
        process = launch_engine_process(config)
        self.engines = EngineProcesses("echo", [process.address], [process], [config])
        self.losses: list[tuple[int, str, bool]] = []
        self.deaths: list[str] = []
        self.engines.on_loss = lambda one: self.losses.append((one.pid, one.describe_end(), one.was_ended_from_outside))
        self.engines.watch(lambda line, _was_killed: self.deaths.append(line))

    @property
    def pid(self) -> int:
        return self.engines.processes[0].pid

    async def strike(self, number: signal.Signals) -> None:
        """Returns when there is another process."""
        pid = self.pid
        os.kill(pid, number)
        await until(lambda: self.pid != pid or self.deaths)

    async def wait_until_ready(self) -> None:
        await until(lambda: self.engines.processes[0].has_been_ready)


@asynccontextmanager
async def watched(options: str = "") -> AsyncIterator[Watched]:
    one = Watched(options)
    try:
        yield one
    finally:
        await one.engines.stop()


async def test_the_cause_of_each_end_is_passed_on() -> None:
    async with watched() as one:
        await one.wait_until_ready()
        expected = []
        for number, is_outside in ((signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGTERM, True)):
            how = "exit status 0" if number == signal.SIGTERM else f"killed by {number.name}"
            expected.append((one.pid, how, is_outside))
            await one.strike(number)
            await one.wait_until_ready()
        assert one.losses == expected
        assert one.deaths == []


async def test_one_that_a_signal_ends_while_it_replaces_another_is_replaced_too() -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        async with watched("load_delay_s=0.5") as one:
            await one.wait_until_ready()
            await one.strike(signal.SIGKILL)
            await until(lambda one=one: any(one.engines.processes[0].directory.glob("*")))  # it loads
            await one.strike(number)
            await one.wait_until_ready()
            assert one.deaths == []
