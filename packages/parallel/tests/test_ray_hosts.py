"""What is refused before a Ray cluster is joined, and what an engine core gets of its nodes; without Ray."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmstack_engine_client.hosts.rendezvous import make_launcher
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.config import HostsConfig
from llmstack_parallel import ray_hosts, ray_probe
from llmstack_parallel.ray_hosts import bundle, check_token, cluster_address
from llmstack_parallel.ray_ranks import bundles_for
from llmstack_parallel.ray_signals import own_signal_handlers
from llmstack_types import EngineStartError, ModelRunnerConfig


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    hosts = HostsConfig("tcp://127.0.0.1:29550", size=2, num_local=0, backend="ray")
    with pytest.raises(EngineStartError, match=r"pip install 'llmstack-parallel\[ray\]'"):
        make_launcher(EngineConfig(ModelRunnerConfig("echo"), runner="echo", hosts=hosts), hosts)


@pytest.mark.parametrize(
    ("variables", "has_file", "is_enough"),
    [
        ({}, False, False),
        ({"RAY_AUTH_MODE": "token"}, False, False),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}, True, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}, False, True),
        ({"RAY_AUTH_TOKEN_PATH": "/run/token"}, False, True),
        ({"RAY_AUTH_MODE": "token"}, True, True),
    ],
)
def test_a_cluster_that_asks_for_a_token_is_refused_at_once_without_one(
    variables: dict[str, str], has_file: bool, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if has_file:
        (tmp_path / "auth_token").write_text("t", encoding="utf-8")
    monkeypatch.setattr(ray_hosts, "_TOKEN_FILE", tmp_path / "auth_token")
    probed = subprocess.CompletedProcess([], ray_probe.ASKS_FOR_TOKEN)
    monkeypatch.setattr(ray_hosts.subprocess, "run", lambda *_, **__: probed)
    if is_enough:
        check_token("10.0.0.1:6379")
        return
    with pytest.raises(EngineStartError, match="asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"):
        check_token("10.0.0.1:6379")


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:port"])
def test_only_the_address_of_a_running_cluster_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EngineStartError, match="HOST:PORT of a running Ray cluster"):
        cluster_address()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address() == "10.0.0.1:6379"


def test_an_engine_core_gets_its_share_of_the_smallest_node_or_a_gpu_for_each_rank() -> None:
    assert bundle([{"CPU": 16.0}, {"CPU": 8.0}], 2, 1) == {"CPU": 4.0}
    assert bundle([{"CPU": 1.0}], 4, 1) == {"CPU": 1.0}
    assert bundle([{"CPU": 16.0, "GPU": 8.0}], 2, 4) == {"CPU": 1.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("sizes", "nodes", "share", "bundles"),
    [
        ((2, 2), [{"CPU": 8.0}, {"CPU": 8.0}], {"CPU": 4.0}, [(1,), (2, 3)]),
        ((4, 1), [{"CPU": 4.0, "GPU": 4.0}], {"CPU": 1.0, "GPU": 1.0}, [(1, 2, 3)]),
        ((4, 1), [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}], {"CPU": 1.0, "GPU": 1.0}, [(1,), (2,), (3,)]),
        ((1, 3), [{"CPU": 1.0}], {"CPU": 1.0}, [(1,), (2,)]),
    ],
)
def test_the_ranks_of_a_stage_are_on_one_node_where_it_is_large_enough(
    sizes: tuple[int, int], nodes: list[dict[str, float]], share: dict[str, float], bundles: list[tuple[int, ...]]
) -> None:
    config = ModelRunnerConfig("model", tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    assert bundles_for(config, nodes) == (share, bundles)


@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "another thread"])
def test_the_signal_handlers_of_a_process_that_joins_a_cluster_stay(is_main: bool) -> None:
    """Ray replaces them below Python; its handler of SIGTERM aborts the process after three seconds."""
    received: list[int] = []

    def join() -> None:
        with own_signal_handlers():
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN

    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        if is_main:
            join()
        else:
            thread = threading.Thread(target=join)
            thread.start()
            thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
