"""Engine cores as actors of a Ray cluster of two nodes: a node that is killed costs a pause, and no stream its text."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.ports import free_port
from page_commands import options_of
from ray_cluster import cluster

import llmstack_demo_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: llmstack-parallel[ray]"),
]


def options(tmp_path: Path) -> list[str]:
    key_file = tmp_path / "cluster.key"
    subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", str(key_file)], check=True)
    values = {"-dp": "2", "--data-parallel-address": "127.0.0.1", "--cluster-key-file": str(key_file)}
    line = options_of("deployment.md", "Ray", 0, values)
    return [*line, "--data-parallel-rpc-port", str(free_port()), "--cluster-timeout", "1"]


def echo_model(tmp_path: Path) -> list[str]:
    folder = tmp_path / "echo?step_delay_s=0.02"
    folder.symlink_to(llmstack_demo_model.model_path())
    return [str(folder), "--runner", "echo", "--served-model-name", "llmstack-demo"]


def read_all(server: Any, meanwhile: Callable[[], None] | None = None) -> list[str]:
    texts = [""] * 4
    counts = [0] * 4

    def read(number: int) -> None:
        stream = server.client.completions.create(
            model="llmstack-demo", prompt=f"Stream {number} goes on", max_tokens=250, stream=True,
            temperature=0.0, extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in stream:
            texts[number] += chunk.choices[0].text
            counts[number] += 1

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        server.wait_for(lambda: min(counts) > 5, "running streams")
        meanwhile()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return texts


@pytest.mark.parametrize("num_api_processes", [1, 2])
def test_streams_go_on_when_a_node_is_killed(
    launch: Callable[..., Any], tmp_path: Path, num_api_processes: int
) -> None:
    with cluster(has_token=True) as ray:
        processes = ["--api-server-count", str(num_api_processes)]
        server = launch(*echo_model(tmp_path), *options(tmp_path), *processes, env=ray.env)
        server.wait_until_listening()
        server.wait_for(lambda: server.log.count(" serves") == 2 * num_api_processes, "engine cores on Ray")
        server.wait_for(lambda: server.get_status("/ready") == 200, "ready server")
        expected = read_all(server)
        assert len(set(expected)) == 4
        assert read_all(server, lambda: ray.kill(1)) == expected
        assert server.get_status("/ready") == 200
        assert read_all(server, server.process.terminate) == expected  # Ray would abort it after three seconds
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log


def test_a_cluster_that_asks_for_no_token_is_refused(launch: Callable[..., Any], tmp_path: Path) -> None:
    with cluster(has_token=False) as ray:
        server = launch(*echo_model(tmp_path), *options(tmp_path), env=ray.env)
        assert server.process.wait(120) == 1
        assert "asks for no token" in server.log
        assert "Traceback" not in server.log


def test_streams_go_on_when_the_node_of_a_rank_is_killed(launch: Callable[..., Any], tmp_path: Path) -> None:
    key_file = tmp_path / "cluster.key"
    subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", str(key_file)], check=True)
    line = ["-pp", "3", "--distributed-executor-backend", "ray", "--trust-cluster-network", "lo"]
    line += ["--cluster-key-file", str(key_file), "--max-model-len", "512", "--api-server-count", "2"]
    with cluster(has_token=True, num_cpus=2) as ray:
        server = launch(*line, env=ray.env)
        server.wait_until_ready()
        assert "they exchange data by NodesExchange" in server.log
        assert [ray.num_ranks(number) for number in (0, 1)] == [1, 1]  # stages are spread
        expected = read_all(server)
        assert len(set(expected)) == 4
        assert read_all(server, lambda: ray.kill(1)) == expected
        assert ray.num_ranks(0) == 2
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_replicas_on_ray_place_ranks_of_their_own(launch: Callable[..., Any], tmp_path: Path) -> None:
    line = [*options(tmp_path), "-pp", "2", "--distributed-executor-backend", "ray", "--trust-cluster-network", "lo"]
    with cluster(has_token=True, num_cpus=2) as ray:
        server = launch(*line, "--max-model-len", "512", env=ray.env)
        server.wait_until_listening()
        server.wait_for(lambda: server.log.count(" serves") == 2, "engine cores on Ray", 240)
        assert ray.num_ranks(0) + ray.num_ranks(1) == 2
        expected = read_all(server)
        assert len(set(expected)) == 4
        assert server.stop() == 0
        assert "Traceback" not in server.log
