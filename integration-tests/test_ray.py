"""Engine cores as actors of a Ray cluster of two nodes: a node that is killed costs a pause, and no stream its text."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import llmstack_demo_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: llmstack-parallel[ray]"),
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Cluster:
    """A head node and another one, as an operator starts them; both are this machine."""

    def __init__(self, folder: Path, num_cpus: int, *, has_token: bool) -> None:
        self._folder = folder
        self._num_cpus = num_cpus
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {
            "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }  # fmt: skip
        if has_token:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        else:
            self.env |= {"RAY_AUTH_MODE": "disabled"}
        port = self.address.rpartition(":")[2]
        options = [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}"]
        self.nodes = [self._start("--head", *options)]
        self.nodes.append(self._start(f"--address={self.address}"))

    def _start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={self._num_cpus}"]
        command += options
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | self.env
        if "--head" in options:
            del environment["RAY_ADDRESS"]
        log = self._folder / f"node{len(options)}.log"
        with log.open("wb") as output:
            node = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while "--block" not in log.read_text():  # it says that it now waits
            assert node.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        return node

    def num_ranks(self, number: int) -> int:
        """Ranks of a model that run on a node."""
        processes = psutil.Process(self.nodes[number].pid).children(recursive=True)
        return sum("llmstack_parallel.rank" in process.cmdline() for process in processes)

    def kill(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(self.nodes[number].pid)
            for process in [*node.children(recursive=True), node]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.nodes[number].wait(30)


@contextlib.contextmanager
def cluster(*, has_token: bool, num_cpus: int = 1) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a short path: Ray has sockets there
        one = Cluster(Path(folder), num_cpus, has_token=has_token)
        try:
            yield one
        finally:
            for number in (1, 0):
                one.kill(number)


def options(tmp_path: Path) -> list[str]:
    key_file = tmp_path / "cluster.key"
    subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", str(key_file)], check=True)
    return [
        "-dp", "2", "--data-parallel-backend", "ray", "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", str(free_port()), "--cluster-key-file", str(key_file), "--cluster-timeout", "1",
    ]  # fmt: skip


def echo_model(tmp_path: Path) -> list[str]:
    folder = tmp_path / "echo?step_delay_s=0.02"
    folder.symlink_to(llmstack_demo_model.model_path())
    return [str(folder), "--runner", "echo", "--served-model-name", "llmstack-demo"]


def read_all(server: Any, meanwhile: Callable[[], None] | None = None) -> list[str]:
    texts = [""] * 4
    counts = [0] * 4

    def read(number: int) -> None:
        stream = server.client.completions.create(
            model="llmstack-demo", prompt=f"Stream {number} goes on", max_tokens=150, stream=True,
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


def test_streams_go_on_when_a_node_is_killed(launch: Callable[..., Any], tmp_path: Path) -> None:
    with cluster(has_token=True) as ray:
        server = launch(*echo_model(tmp_path), *options(tmp_path), env=ray.env)
        server.wait_until_listening()
        server.wait_for(lambda: server.log.count(" serves") == 2, "engine cores on Ray")
        server.wait_for(lambda: server.get_status("/ready") == 200, "ready server")
        expected = read_all(server)
        assert len(set(expected)) == 4
        assert read_all(server, lambda: ray.kill(1)) == expected
        assert server.get_status("/ready") == 200
        assert server.stop() == 0
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
    line += ["--cluster-key-file", str(key_file), "--max-model-len", "512"]
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
