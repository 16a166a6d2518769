"""An engine that sleeps: refusals in every process, its memory, and its answers when it is awake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_calls import complete, complete_all, open_stream, post, rest_of


def resident_bytes(server: Any) -> int:
    return int(psutil.Process(server.engine_pid()).memory_info().rss)


def running_beside_refused_sleep(server: Any) -> Any:
    """A stream that runs, so that its engine core does not sleep; it takes about a second."""
    for _ in range(5):
        stream = open_stream(server)
        if (status := post(server, "/sleep")) == 503:
            return stream
        assert (status, rest_of(stream)) == (200, "length")  # it had ended before: this process stood still
        assert post(server, "/wake_up") == 200
    raise AssertionError("the stream ended too early five times")


def test_a_sleeping_engine_refuses_in_every_process_and_says_the_same_when_awake(
    launch: Callable[..., Any], expected: list[str]
) -> None:
    server = launch("--api-server-count", "2", "--enable-control-routes", "--enable-sleep-mode")
    server.wait_until_ready()
    running_beside_refused_sleep(server).close()
    server.wait_for(lambda: server.metric("llmstack:num_requests_running") == 0, "abort")
    for level in (1, 2):
        assert post(server, f"/sleep?level={level}") == 200
        for _ in range(4):  # any process may answer
            assert server.get_json("/is_sleeping") == {"is_sleeping": True}
            assert server.get_status("/health") == 200
            status, body, _ = server.post("/v1/completions", {"model": "llmstack-demo", "prompt": "x"})
            assert (status, "asleep" in body["error"]["message"]) == (503, True)
        state = ("weights_offloaded", "discard_all")[level - 1]
        assert server.metric(rf'vllm:engine_sleep_state\{{.*sleep_state="{state}"\}}') == 1
    assert post(server, "/wake_up") == 200
    assert server.get_json("/is_sleeping") == {"is_sleeping": False}
    assert complete_all(server) == expected
    assert (post(server, "/sleep?level=3"), post(server, "/wake_up?tags=graphs")) == (400, 400)
    server.stop()


@pytest.mark.full
def test_a_sleeping_engine_gives_its_memory_back(launch: Callable[..., Any], gpt2_path: Path) -> None:
    server = launch(
        str(gpt2_path), "--load-format", "dummy", "--served-model-name", "llmstack-demo",
        "--enable-control-routes", "--enable-sleep-mode",
    )  # fmt: skip
    server.wait_until_ready()
    prompt = "word " * 600  # fills blocks
    before = complete(server, prompt)
    rss = [resident_bytes(server)]
    for level in (1, 2):
        assert post(server, f"/sleep?level={level}") == 200
        rss.append(resident_bytes(server))
    assert rss[0] - rss[1] > 10 << 20  # keys and values of 600 tokens
    assert rss[1] - rss[2] > 200 << 20  # 124 million weights
    assert post(server, "/wake_up") == 200
    assert complete(server, prompt) == before
    server.stop()


def test_an_engine_without_requests_sleeps_and_the_next_request_wakes_it(
    launch: Callable[..., Any], expected: list[str]
) -> None:
    server = launch("--idle-sleep", "1s", "--idle-sleep-level", "2")
    server.wait_until_ready()
    stream = open_stream(server)  # longer than a second
    assert server.get_json("/health") == {"status": "Ready", "sleep_level": 0}
    assert rest_of(stream) == "length"
    for _ in range(2):
        server.wait_for(lambda: server.get_json("/health")["sleep_level"] == 2, "sleep")
        num_wakes = server.metric(r"llmstack:idle_wakes_total\{.*\}")
        assert server.metric(r"llmstack:idle_sleeps_total\{.*\}") == num_wakes + 1
        assert complete_all(server) == expected
        assert server.get_json("/health")["sleep_level"] == 0
        assert server.metric(r"llmstack:idle_wakes_total\{.*\}") == num_wakes + 1
    server.wait_for(lambda: server.get_json("/health")["sleep_level"] == 2, "sleep")
    server.stop()
    assert "model llmstack-demo is awake after" in server.log
