"""Cached prefixes on disk: the next server goes on from them, with the same tokens and for the same key alone."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PROMPT = "Once upon a time there was a little boat on the sea. " * 12
KEYS = ("alice", "bob")
NUM_SESSIONS, LENGTH = 16, 200


class Servers:
    """Servers one after another over the same folders."""

    def __init__(self, serve: Callable[..., Any], model: Path, folder: Path) -> None:
        (folder / "keys").write_text("\n".join(KEYS))
        self._serve = serve
        self._arguments = [
            str(model), "--served-model-name", "stories", "--api-key-file", str(folder / "keys"),
            "--state-dir", str(folder / "state"), "--kv-cache-dir", str(folder / "cache"),
        ]  # fmt: skip

    def start(self, *arguments: str) -> Any:
        return self._serve(*self._arguments, *arguments)


def complete(server: Any, key: str, prompt: str = PROMPT, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": "stories", "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}
    status, answer, _ = server.post("/v1/completions", body, {"Authorization": f"Bearer {key}"})
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: Any, key: str, name: str) -> float:
    request = urllib.request.Request(server.url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^llmstack:{re.escape(name)}[{{,].*? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "unfinished")


def quiet(value: Callable[[], float], duration_s: float = 1.5) -> Callable[[], bool]:
    """Whether a number above 0 has not changed for so long."""
    last, changed_s = 0.0, time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, changed_s
        new = value()
        if new != last:
            last, changed_s = new, time.monotonic()
        return last > 0 and time.monotonic() - changed_s > duration_s

    return is_quiet


def test_the_next_server_goes_on_from_the_prefixes_of_a_key(
    serve: Callable[..., Any], stories_path: Path, tmp_path: Path
) -> None:
    servers = Servers(serve, stories_path, tmp_path)
    with servers.start() as server:
        text, num_cached = complete(server, "alice")
        assert num_cached == 0
    with servers.start() as server:
        assert complete(server, "bob") == (text, 0), "another key"
        found, num_cached = complete(server, "alice")
        assert found == text
        assert num_cached > 100
        assert metric(server, "alice", "kv_cache_disk_tokens_total") == num_cached
        assert metric(server, "alice", "kv_cache_disk_bytes") > 0
        assert complete(server, "alice", cache_salt="other") == (text, 0)


@pytest.mark.full
def test_a_killed_engine_core_is_replaced_by_one_that_reads(
    serve: Callable[..., Any], stories_path: Path, tmp_path: Path
) -> None:
    servers = Servers(serve, stories_path, tmp_path)
    with servers.start("--max-engine-restarts", "2") as server:
        text, _ = complete(server, "alice")
        server.wait_for(lambda: metric(server, "alice", "kv_cache_disk_written_bytes_total") > 0, "written blocks")
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        server.wait_for(lambda: server.engine_pids() not in ([], [pid]), "another engine core")
        found, _ = complete(server, "alice")
        assert found == text
        assert metric(server, "alice", "kv_cache_disk_tokens_total") > 100


@pytest.mark.full
def test_sessions_under_a_crash_go_on_from_their_blocks(
    serve: Callable[..., Any], stories_path: Path, tmp_path: Path
) -> None:
    servers = Servers(serve, stories_path, tmp_path)
    with servers.start("--max-engine-restarts", "2") as server, ThreadPoolExecutor(NUM_SESSIONS) as threads:
        prompts = [f"This is story {number}. {PROMPT}" for number in range(NUM_SESSIONS)]
        expected = [complete(server, "alice", prompt, max_tokens=LENGTH)[0] for prompt in prompts]
        server.wait_for(quiet(lambda: num_bytes_in(tmp_path / "cache")), "all blocks on disk")
        assert metric(server, "alice", "kv_cache_disk_tokens_total") == 0
        again = [threads.submit(complete, server, "alice", prompt, max_tokens=LENGTH) for prompt in prompts]
        running = "num_requests_running"
        server.wait_for(lambda: metric(server, "alice", running) >= NUM_SESSIONS, "all sessions in the engine core")
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        assert [one.result()[0] for one in again] == expected
        assert server.engine_pids() not in ([], [pid])
        read = metric(server, "alice", "kv_cache_disk_tokens_total")
        assert read > 100 * NUM_SESSIONS, "every session reads its prompt"
        assert metric(server, "alice", "kv_cache_disk_misses_total") == NUM_SESSIONS, "those of the first time"
