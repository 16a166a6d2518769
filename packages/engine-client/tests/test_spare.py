"""A warm spare: it loads the model with low priority, and replaces an engine core that ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.processes import is_running, wait_until

from llmstack_engine_client import RecoveringClient, make_async_client
from llmstack_engine_client.processes.launcher import launch_engine_process, make_spares, relaunch_engine_process
from llmstack_engine_client.processes.spare import MAX_FAILURES, Spares
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.priority import LOWEST_PRIORITY
from llmstack_types import EngineCoreRequest, EngineStartError, ModelRunnerConfig, SamplingParams


def config(options: str = "", **changes: Any) -> EngineConfig:
    values = {"runner": "echo", "log_level": "CRITICAL", "shutdown_grace_s": 3.0, "max_restarts": 3, **changes}
    return EngineConfig(ModelRunnerConfig(f"echo?{options}"), warm_spare=True, **values)


def spares_of(client: RecoveringClient) -> Spares:
    assert client._spares is not None
    return client._spares


def priorities(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(f"/proc/{pid}/task")}


def session_priority(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/autogroup").read_text().partition(" ")[2].strip()
    except OSError:
        return ""


async def test_the_spare_goes_on_with_the_requests_and_another_one_is_prepared() -> None:
    # Each of the two computes half of the tokens, however late this process looks.
    client = make_async_client(config("hang_at_step=16"))
    assert isinstance(client, RecoveringClient)
    await client.wait_until_ready()
    client.listen(None)
    await wait_until(lambda: spares_of(client).is_ready)  # the client prepares it by itself
    first_pid, spare_pid = client.pid, spares_of(client).pid
    assert spare_pid is not None
    await client.add_request(EngineCoreRequest("r", [5, 6, 7], SamplingParams(max_tokens=30, seed=0)))
    tokens: list[int] = []
    while len(tokens) < 15:
        tokens += [token for output in (await client.get_outputs()).outputs for token in output.new_token_ids]
    os.kill(first_pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while len(tokens) < 30:
            tokens += [token for output in (await client.get_outputs()).outputs for token in output.new_token_ids]
    assert tokens == [5, 6, 7] * 10
    assert (client.pid, client.num_restarts) == (spare_pid, 1)
    assert LOWEST_PRIORITY not in priorities(spare_pid)
    await wait_until(lambda: spares_of(client).is_ready)
    next_pid = spares_of(client).pid
    assert next_pid not in (None, spare_pid)
    await client.shutdown()
    assert not any(is_running(pid) for pid in (first_pid, spare_pid, next_pid or 0))


async def test_it_serves_where_the_one_before_listened_and_also_while_it_still_loads() -> None:
    settings = config("load_delay_s=0.3")
    spares = make_spares(settings)
    assert spares is not None
    process = launch_engine_process(settings)
    spares.prepare()
    pid = spares.pid
    assert pid is not None
    assert not spares.is_ready
    later = relaunch_engine_process(settings, process, spares)
    assert (later.pid, later.address) == (pid, process.address)
    await wait_until(lambda: later.has_been_ready)
    assert later.directory.stat().st_mode & 0o777 == 0o700
    later.stop()
    assert not later.directory.exists()
    spares.close()


async def test_it_loads_with_the_lowest_priority_where_that_can_be_undone() -> None:
    spares = make_spares(config())
    assert spares is not None
    spares.prepare()
    await wait_until(lambda: spares.is_ready)
    pid = spares.pid
    assert pid is not None
    assert LOWEST_PRIORITY in priorities(pid) or session_priority(pid) in ("", "nice 19")
    spares.close()
    assert not is_running(pid)
    spares.prepare()
    assert spares.pid is None


async def test_one_that_ends_is_replaced_and_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    spares = make_spares(config("load_error=no"))
    assert spares is not None
    pids = set()
    for _ in range(MAX_FAILURES):
        spares.prepare()
        pid = spares.pid
        assert pid is not None
        pids.add(pid)
        await wait_until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
    spares.prepare()
    assert (spares.pid, len(pids)) == (None, MAX_FAILURES)
    assert caplog.text.count("no warm spare") == MAX_FAILURES
    assert "goes on without one" in caplog.text


def test_a_spare_that_cannot_be_started_leaves_the_usual_start() -> None:
    def fail() -> Any:
        raise EngineStartError("no further process")

    spares = Spares(config(), fail)
    spares.prepare()
    assert spares.take(Path(), "") is None
