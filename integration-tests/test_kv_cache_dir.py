"""Cached prefixes on disk: the next server goes on from them, with the same tokens and for the same key alone."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "Once upon a time there was a little boat on the sea. " * 12
KEYS = ("alice", "bob")


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
