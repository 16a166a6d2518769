"""A Ray cluster of two nodes on this machine, as an operator starts it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from engine_core_helpers.ports import free_port


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
