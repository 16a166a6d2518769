"""API processes that share engine cores reload together, or none of them does."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from server_helpers.waiting import wait_until

from llmstack_engine_client.processes.engines import EngineProcesses
from llmstack_llm import AsyncLLM, RequestObserver, RequestOutput
from llmstack_llm.testing import write_model_folder
from llmstack_server.app import build_app
from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import HTTPConfig, ServeConfig, config_from
from llmstack_server.serving import reload_follower, reload_supervisor
from llmstack_server.serving.engine_processes import launch_engine_processes
from llmstack_server.serving.process_channel import Message
from llmstack_server.serving.reload_follower import ReloadFollower
from llmstack_server.serving.reload_supervisor import ReloadSupervisor
from llmstack_server.testing import call, ready_state
from llmstack_server.testing.adapters import write_adapter

OPTIONS = (
    "--runner", "llmstack_engine_core.testing:EchoModelRunner", "--api-server-count", "2", "--num-kv-blocks", "32",
    "--enable-control-routes", "--enable-lora", "--log-level", "critical", "--reload-models",
)  # fmt: skip
BODY = {"prompt": "Hello", "max_tokens": 100, "stream": True}


class Seen(RequestObserver):
    """Requests of which tokens have come."""

    def __init__(self) -> None:
        self.request_ids: set[str] = set()

    def on_output(self, output: RequestOutput) -> None:
        self.request_ids.add(output.request_id)


class Process:
    """An API process without a process."""

    is_serving = True

    def __init__(self, cluster: Cluster, index: int) -> None:
        order = cluster.supervisor.addresses_order(cluster.started)
        self.cluster, self.index = cluster, index
        settings = cluster.config.reload.entries[order["reloaded"]["name"]].settings
        args = dataclasses.replace(cluster.config.engine, **settings, model=order["model_path"])
        self.llm = AsyncLLM.from_engine_args(args, client_addresses=order["addresses"], client_index=index)
        self.llm.add_observer(seen := Seen())
        self.seen, self._order = seen.request_ids, order
        self.instead: dict[str, Callable[[], None]] = {}

    async def start(self) -> Self:
        ready = await self.llm.wait_until_ready()
        state = ready_state(self.llm, HTTPConfig(enable_control_routes=True), ready=ready)  # type: ignore[arg-type]
        config = self.cluster.config
        state.config = dataclasses.replace(state.config, engine=config.engine, reload=config.reload)
        self._follower = state.shared_reloads = ReloadFollower(state, self.llm, self._note)
        self._follower.begin(self._order["reloaded"], self._order["start_model_path"])
        self.app, self.state = build_app(state), state
        return self

    def _note(self, event: Message) -> None:
        assert self.cluster.supervisor.note(self.index, json.loads(json.dumps(event)), self.cluster.watch)

    def send(self, order: Message) -> None:
        self.instead.get(order["reload"], lambda: self._follower.take(json.loads(json.dumps(order))))()

    def end(self) -> None:
        """As the supervisor sees the end of a process."""
        self.is_serving = False
        self.cluster.supervisor.lose(self.index)

    async def weights(self) -> dict[str, Any]:
        found: dict[str, Any] = (await call(self.app, "GET", "/v1/models")).json()["data"][0]
        return {key: found[key] for key in ("weights", "previous_weights")}

    async def reload(self, name: str, running: str = "finish") -> tuple[int, dict[str, Any]]:
        answer = await call(self.app, "POST", "/v1/reload", {"name": name, "running": running})
        return answer.status, answer.json()


class Cluster:
    """Two API processes, and their engine core in a process of its own."""

    def __init__(self, folder: Path, *entries: str) -> None:
        parser = argparse.ArgumentParser()
        add_serve_arguments(parser)
        line = [str(folder), *OPTIONS, *entries]
        self.config: ServeConfig = config_from(settings_from(parser.parse_args(line), {}))
        self.members: dict[int, Process] = {}
        self.supervisor = ReloadSupervisor(self.config, lambda: self.members)
        self.started = launch_engine_processes(dataclasses.replace(self.config.engine, model=str(folder)), [])
        self.supervisor.begin(self.started)
        self.all: list[Process] = []

    @property
    def engine_pid(self) -> int:
        assert self.supervisor.engines is not None
        return self.supervisor.engines.processes[0].pid

    def watch(self, engines: EngineProcesses) -> None:
        engines.watch(lambda line, _: self.supervisor.note_death(engines, line))

    async def add(self, index: int) -> Process:
        process = Process(self, index)
        self.all.append(process)
        self.members[index] = process
        return await process.start()

    async def streams(self) -> list[asyncio.Task[Any]]:
        """A stream of each API process, whose first token has come; their engine core stands still."""
        for process in self.members.values():
            process.seen.clear()
        found = [asyncio.create_task(call(one.app, "POST", "/v1/completions", BODY)) for one in self.members.values()]
        await wait_until(lambda: all(one.seen for one in self.members.values()))
        os.kill(self.engine_pid, signal.SIGSTOP)
        return found

    async def __aenter__(self) -> Cluster:
        self.watch(self.started)
        await asyncio.gather(self.add(0), self.add(1))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(one.llm.shutdown() for one in self.all))
        await self.supervisor.stop()
        assert self.supervisor.engines is not None
        await self.supervisor.engines.stop()


def texts(answers: list[Any]) -> list[str]:
    found = [[event for event in one.events() if isinstance(event, dict)] for one in answers]
    return ["".join(event["choices"][0]["text"] for event in one if event["choices"]) for one in found]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_streams_of_all_api_processes_end_with_the_old_weights_or_move_and_none_is_lost(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m?step_delay_s=0.02")
    other = write_model_folder(tmp_path / "other?step_delay_s=0.02", generation_config={"max_new_tokens": 5})
    async with Cluster(folder, f"next={other}") as cluster:
        first, second = cluster.all
        before, old_pid = await first.weights(), cluster.engine_pid
        running = await cluster.streams()
        status, answer = await first.reload("next")
        assert (status, answer["num_finishing_requests"], answer["num_moved_requests"]) == (200, 2, 0)
        for process in (first, second):  # the next model's own default is five tokens
            new = (await call(process.app, "POST", "/v1/completions", {"prompt": "Hello"})).json()
            assert (new["choices"][0]["text"], new["system_fingerprint"]) == (
                "Hello", answer["weights"]["system_fingerprint"],
            )  # fmt: skip
            assert await process.weights() == {
                "weights": answer["weights"], "previous_weights": [before["weights"]],
            }  # fmt: skip
        status, refused = await second.reload("start")
        assert (status, "still run" in refused["error"]["message"]) == (409, True)
        os.kill(old_pid, signal.SIGCONT)
        assert texts(await asyncio.gather(*running)) == ["Hello" * 20] * 2
        await wait_until(lambda: not is_running(old_pid))

        running, old_pid = await cluster.streams(), cluster.engine_pid
        status, answer = await second.reload("start", "move")
        assert (status, answer["num_finishing_requests"], answer["num_moved_requests"]) == (200, 0, 2)
        os.kill(old_pid, signal.SIGCONT)  # nothing is read of what it still says
        assert texts(await asyncio.gather(*running)) == ["Hello" * 20] * 2
        assert (await first.weights())["weights"] == before["weights"]
        await wait_until(lambda: not is_running(old_pid))


async def test_a_reload_that_one_api_process_cannot_follow_changes_nothing_in_any(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    failing = write_model_folder(tmp_path / "m?load_error=no such weights")
    other = write_model_folder(tmp_path / "other")
    write_adapter(tmp_path / "style")
    styled = json.dumps({"name": "styled", "lora_modules": {"style": str(tmp_path / "style")}})
    async with Cluster(folder, f"failing={failing}", f"next={other}", styled) as cluster:
        first, second = cluster.all
        before, pid = await first.weights(), cluster.engine_pid
        status, refused = await first.reload("failing")
        assert (status, "no such weights" in refused["error"]["message"]) == (409, True)

        second.instead = {"prepare": second.end}
        status, refused = await first.reload("next")
        assert (status, "API process 1 has ended" in refused["error"]["message"]) == (409, True)
        status, refused = await first.reload("next")
        assert (status, "is being replaced" in refused["error"]["message"]) == (409, True)
        assert (await first.weights(), cluster.engine_pid) == (before, pid)

        # One that ends later is replaced by one with the weights of now.
        second = await cluster.add(1)
        second.instead = {"switch": second.end}
        status, answer = await first.reload("next")
        assert (status, answer["weights"]["name"]) == (200, "next")
        third = await cluster.add(1)
        assert await third.weights() == await first.weights()
        await wait_until(lambda: not is_running(pid))

        # A set of adapters needs no engine core.
        pid = cluster.engine_pid
        assert (await third.reload("styled"))[0] == 200
        for process in (first, third):
            answer = (await call(process.app, "POST", "/v1/completions", {"model": "style", "prompt": "Hi"})).json()
            assert answer["choices"][0]["text"].startswith("iH")
        assert cluster.engine_pid == pid


async def test_a_reload_under_way_when_the_server_stops_is_refused_in_these_words(tmp_path: Path) -> None:
    folder, other = write_model_folder(tmp_path / "m"), write_model_folder(tmp_path / "other")
    async with Cluster(folder, f"next={other}") as cluster:
        first, second = cluster.all
        before, pid = await first.weights(), cluster.engine_pid
        asked = asyncio.Event()
        second.instead = {"prepare": asked.set}
        reload = asyncio.create_task(first.reload("next"))
        await asked.wait()
        cluster.supervisor.begin_stop()
        second.end()
        for status, refused in (await reload, await first.reload("next")):
            assert (status, "the server stops" in refused["error"]["message"]) == (409, True)
        assert (await first.weights(), cluster.engine_pid) == (before, pid)


async def test_a_process_that_ends_because_the_server_stops_is_no_cause(tmp_path: Path) -> None:
    folder, other = write_model_folder(tmp_path / "m"), write_model_folder(tmp_path / "other")
    async with Cluster(folder, f"next={other}") as cluster:
        first, second = cluster.all

        def end() -> None:
            cluster.supervisor.begin_stop()
            second.end()

        second.instead = {"prepare": end}
        status, refused = await first.reload("next")
        assert (status, "the server stops" in refused["error"]["message"]) == (409, True)


def end_late(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Engine cores end after this event."""
    stop, may_end = EngineProcesses.stop, asyncio.Event()

    async def stop_late(engines: EngineProcesses) -> None:
        await may_end.wait()
        await stop(engines)

    monkeypatch.setattr(EngineProcesses, "stop", stop_late)
    return may_end


async def test_a_reload_waits_while_engine_cores_without_requests_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = end_late(monkeypatch)
    folder = write_model_folder(tmp_path / "m")
    async with Cluster(folder, '{"name": "larger", "num_kv_blocks": 64}') as cluster:
        first, second = cluster.all
        assert (await first.reload("larger"))[0] == 200
        await wait_until(lambda: cluster.supervisor.is_ending)
        again = asyncio.create_task(second.reload("start"))
        await asyncio.wait([again], timeout=0.2)
        assert not again.done()
        may_end.set()
        assert (await again)[0] == 200


async def test_a_reload_waits_for_the_end_of_engine_cores_no_longer_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = end_late(monkeypatch)
    folder = write_model_folder(tmp_path / "m")
    async with Cluster(folder, '{"name": "larger", "num_kv_blocks": 64}') as cluster:
        first, second = cluster.all
        assert (await first.reload("larger"))[0] == 200
        await wait_until(lambda: cluster.supervisor.is_ending)
        monkeypatch.setattr(reload_supervisor, "END_TIMEOUT_S", 0.1)
        status, answer = await second.reload("start")
        may_end.set()
        assert status == 409
        assert "the engine core before the last reload has not ended yet" in answer["error"]["message"]


async def test_a_reload_waits_for_a_process_that_has_not_yet_said_that_its_requests_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model_folder(tmp_path / "m?step_delay_s=0.02")
    write_adapter(tmp_path / "style")
    styled = json.dumps({"name": "styled", "lora_modules": {"style": str(tmp_path / "style")}})
    async with Cluster(folder, '{"name": "larger", "num_kv_blocks": 64}', styled) as cluster:
        first, second = cluster.all
        running, old_pid = await cluster.streams(), cluster.engine_pid
        assert (await first.reload("larger"))[0] == 200
        os.kill(old_pid, signal.SIGCONT)
        monkeypatch.setattr(reload_follower, "POLL_S", 0.5)
        await asyncio.gather(*running)
        # No request runs any more, and the second process says so later than this is asked.
        assert (await first.reload("styled"))[0] == 200
        assert not is_running(old_pid)
        assert (await call(second.app, "POST", "/v1/completions", {"model": "style", "prompt": "Hi"})).status == 200
