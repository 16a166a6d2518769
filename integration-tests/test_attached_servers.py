"""Engine cores without HTTP, and the servers that attach to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from page_commands import options_of
from server_calls import complete_all, open_stream, rest_of


class Headless:
    """Engine cores without HTTP."""

    def __init__(self, launch: Callable[..., Any], *arguments: str, env: dict[str, str]) -> None:
        self.server = launch(*arguments, env=env)
        self.server.wait_for(lambda: "engine cores are ready" in self.server.log, "ready engine cores")
        self.addresses = re.findall(r"--engine-address (.+)", self.server.log)[-1].split()


def test_servers_attach_to_engine_cores_that_run_without_http(
    launch: Callable[..., Any], runtime_folder: Path, expected: list[str]
) -> None:
    env = {"XDG_RUNTIME_DIR": str(runtime_folder)}
    headless = Headless(launch, "--headless", "-dp", "2", env=env)
    assert len(headless.addresses) == 2
    assert psutil.Process(headless.server.process.pid).net_connections("tcp") == []
    servers = [launch("--engine-address", *headless.addresses, *extra, env=env) for extra in ([], ["-asc", "2"])]
    for server in servers:
        server.wait_until_ready()
        assert complete_all(server) == expected
    stream = open_stream(servers[0])
    servers[0].process.kill()
    servers[0].process.wait(10)
    assert rest_of(stream) == "lost"
    servers[1].wait_for(lambda: servers[1].metric("llmstack:kv_cache_usage_perc") == 0, "freed blocks")
    assert complete_all(servers[1]) == expected
    assert headless.server.stop(timeout_s=20) == 0
    assert servers[1].process.wait(20) == 1
    assert "is gone" in servers[1].log or "engine core died" in servers[1].log
    assert list(runtime_folder.iterdir()) == []


def test_engine_cores_listen_only_where_they_may_and_serve_only_their_model(
    launch: Callable[..., Any], runtime_folder: Path, stories_path: Path
) -> None:
    address = f"ipc://{runtime_folder}/own/engine.sock"
    engines, http = (
        options_of("deployment.md", "Engine cores without HTTP", number, {"--engine-address": address})
        for number in (0, 1)
    )
    headless = Headless(launch, *engines, "--runner", "echo", env={})
    second = launch(*engines)
    assert second.process.wait(30) == 1
    assert "in use" in second.log
    other = launch(str(stories_path), *http)
    assert other.process.wait(60) == 1
    assert "but this front end was given" in other.log
    assert headless.server.stop(timeout_s=20) == 0
    assert not (runtime_folder / "own" / "engine.sock").exists()
    for address in ("tcp://0.0.0.0:5555", "ipc://relative", "tcp://127.0.0.1:5599"):
        refused = launch("--headless", "--engine-address", address)
        assert refused.process.wait(30) == 1
        assert "Traceback" not in refused.log
