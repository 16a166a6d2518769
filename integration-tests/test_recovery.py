"""A server whose engine core dies: streams pause and go on with the text they would have had."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import real_models

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "constrained": {"temperature": 0.0, "extra_body": {"structured_outputs": {"regex": "[a-z ]{150,160}"}}},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}


class Stream(threading.Thread):
    """Reads one completion to its end."""

    def __init__(self, server: Any, model: str, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.chunks: list[Any] = []
        self.error: Exception | None = None
        self._create = lambda: server.client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=140, stream=True, **settings
        )

    def run(self) -> None:
        try:
            for chunk in self._create():
                self.chunks.append(chunk)
                self.text += chunk.choices[0].text
        except openai.OpenAIError as error:
            self.error = error

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].choices[0].finish_reason

    @property
    def num_logprobs(self) -> int:
        return sum(len(chunk.choices[0].logprobs.tokens) for chunk in self.chunks if chunk.choices[0].logprobs)


def read_all(server: Any, model: str, meanwhile: Callable[[list[Stream]], None]) -> dict[str, Stream]:
    streams = {name: Stream(server, model, **settings) for name, settings in SETTINGS.items()}
    for stream in streams.values():
        stream.start()
    meanwhile(list(streams.values()))
    for stream in streams.values():
        stream.join(60)
        assert not stream.is_alive()
        assert stream.error is None
    return streams


def read_disturbed(server: Any, model: str, kill: Callable[[], None]) -> tuple[dict[str, Stream], int]:
    """The streams, all of which ran when `kill` was called, and how often it was called for that.

    They take a fraction of a second. On a busy machine some may have ended before this process has seen them begin.
    """

    def pids() -> list[int]:
        return [engine["pid"] for engine in server.get_json("/server_info")["engines"]]

    def are_replaced() -> bool:  # with several engine cores, a server is ready when one of them is
        return len(now := pids()) == len(former) and now != former

    for attempt in range(1, 6):
        num_running, former = 0, pids()

        def end_engine_core(streams: list[Stream]) -> None:
            nonlocal num_running
            server.wait_for(lambda: all(stream.chunks or not stream.is_alive() for stream in streams), "streams")
            num_running = sum(stream.is_alive() for stream in streams)
            kill()

        streams = read_all(server, model, end_engine_core)
        if num_running == len(streams):
            return streams, attempt
        server.wait_for(are_replaced, "new engine core")
        server.wait_for(lambda: server.get_status("/ready") == 200, "recovered server")
    raise AssertionError("the streams ended too early five times")


def test_streams_go_on_with_the_same_text_in_another_engine_core(serve: Callable[..., Any]) -> None:
    with serve() as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)
        first_pid = server.engine_pid()

        def kill() -> None:
            os.kill(server.engine_pid(), signal.SIGKILL)
            server.wait_for(lambda: server.get_status("/ready") == 503, "recovering server")
            assert server.get_status("/health") == 200

        disturbed, num_kills = read_disturbed(server, model, kill)
        assert {name: stream.text for name, stream in disturbed.items()} == {
            name: stream.text for name, stream in undisturbed.items()
        }
        assert {name: stream.finish_reason for name, stream in disturbed.items()} == {
            name: stream.finish_reason for name, stream in undisturbed.items()
        }
        assert disturbed["logprobs"].num_logprobs == undisturbed["logprobs"].num_logprobs > 0
        assert server.engine_pid() != first_pid
        server.wait_for(lambda: server.get_status("/ready") == 200, "recovered server")
        info = server.get_json("/server_info")
        assert info["processes"]["num_engine_restarts"] == num_kills
        assert info["engine"]["pid"] == server.engine_pid()
        server.wait_for(lambda: server.metric("llmstack:engine_restarts_total") == num_kills, "counted restart")
        assert server.log.count("the engine core died") == num_kills
        assert "Traceback" not in server.log


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8", "int4"])
def test_streams_of_quantized_weights_go_on_with_the_same_text(scheme: str, serve: Callable[..., Any]) -> None:
    """Activations that are rounded per token do not depend on which tokens are computed together."""
    with serve("--quantization", scheme) as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)
        disturbed, num_kills = read_disturbed(server, model, lambda: os.kill(server.engine_pid(), signal.SIGKILL))
        assert [stream.text for stream in disturbed.values()] == [stream.text for stream in undisturbed.values()]
        assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == num_kills


@pytest.mark.full
def test_streams_of_a_trained_model_go_on_with_the_same_text(serve: Callable[..., Any]) -> None:
    with serve(str(real_models.smollm2_file()), "--max-model-len", "1024", "--no-pack-cache") as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)
        assert len({stream.text for stream in undisturbed.values()}) >= 4  # greedy with and without log-probabilities
        disturbed, num_kills = read_disturbed(server, model, lambda: os.kill(server.engine_pid(), signal.SIGKILL))
        assert [stream.text for stream in disturbed.values()] == [stream.text for stream in undisturbed.values()]
        assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == num_kills


@pytest.mark.full
def test_each_of_several_engine_cores_is_replaced_by_itself(serve: Callable[..., Any]) -> None:
    with serve("-dp", "2") as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)
        disturbed, _ = read_disturbed(
            server, model, lambda: os.kill(server.get_json("/server_info")["engines"][1]["pid"], signal.SIGKILL)
        )
        assert [stream.text for stream in disturbed.values()] == [stream.text for stream in undisturbed.values()]


@pytest.mark.full
@pytest.mark.parametrize("processes", [(), ("--api-server-count", "2")])
def test_a_warm_spare_goes_on_with_the_streams(processes: tuple[str, ...], serve: Callable[..., Any]) -> None:
    with serve("--warm-spare", *processes) as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)
        first_pid = server.get_json("/server_info")["engine"]["pid"]
        (spare_pid,) = server.wait_for(lambda: set(server.engine_pids()) - {first_pid}, "spare")

        def kill(streams: list[Stream]) -> None:
            server.wait_for(lambda: all(stream.chunks for stream in streams), "running streams")
            os.kill(first_pid, signal.SIGKILL)

        disturbed = read_all(server, model, kill)
        assert [stream.text for stream in disturbed.values()] == [stream.text for stream in undisturbed.values()]

        def serving_pid() -> int | None:
            engine = server.get_json("/server_info")["engine"]  # null while an API process is not connected yet
            return engine and engine["pid"]

        server.wait_for(lambda: serving_pid() == spare_pid, "spare that serves")
        server.wait_for(lambda: len(server.engine_pids()) == 2, "next spare")


def rank_pids(engine_pid: int) -> list[int]:
    """Processes of the other ranks, which an engine core has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == engine_pid and b"llmstack_parallel.rank" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.full
@pytest.mark.parametrize("flag", ["-tp", "-pp"])
def test_a_rank_that_is_killed_costs_a_pause_and_no_stream(flag: str, serve: Callable[..., Any]) -> None:
    with serve(flag, "2") as server:
        model = str(server.client.models.list().data[0].id)
        undisturbed = read_all(server, model, lambda _: None)

        def kill(streams: list[Stream]) -> None:
            server.wait_for(lambda: all(stream.chunks for stream in streams), "running streams")
            (pid,) = rank_pids(server.engine_pid())
            os.kill(pid, signal.SIGKILL)

        disturbed = read_all(server, model, kill)
        assert [stream.text for stream in disturbed.values()] == [stream.text for stream in undisturbed.values()]
        assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == 1
        assert len(rank_pids(server.engine_pid())) == 1


@pytest.mark.full
def test_a_rank_that_is_killed_is_replaced_before_a_request_comes(serve: Callable[..., Any]) -> None:
    with serve("-tp", "2") as server:
        (pid,) = rank_pids(server.engine_pid())
        os.kill(pid, signal.SIGKILL)

        def num_restarts() -> int:
            return int(server.get_json("/server_info")["processes"]["num_engine_restarts"])

        server.wait_for(lambda: num_restarts() == 1, "an engine core in its place")
        model = str(server.client.models.list().data[0].id)
        assert server.client.completions.create(model=model, prompt="a", max_tokens=2).usage.completion_tokens == 2
        assert num_restarts() == 1
