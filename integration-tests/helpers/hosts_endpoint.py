"""A first machine and another one that joins it, as real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from page_commands import options_of


class Loopback:
    """Two machines that are one."""

    address = "127.0.0.1"

    def prefix(self, machine: str) -> list[str]:
        return []


class Stream(threading.Thread):
    """Reads one completion to its end."""

    def __init__(self, client: httpx.Client, number: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.text, self.num_chunks = "", 0
        self.end: str | None = None
        self._client = client
        self._body = {
            "model": "llmstack-demo", "prompt": f"Stream {number} of some that go on", "max_tokens": max_tokens,
            "stream": True, "seed": number, "temperature": 1.0, "ignore_eos": True,
            "presence_penalty": 0.01, "typical_p": 0.99,  # slow, so that it still runs when a test looks
        }  # fmt: skip

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "choices" not in chunk:
                    self.end = str(chunk)
                    return
                self.num_chunks += 1
                self.text += chunk["choices"][0]["text"]
                self.end = chunk["choices"][0]["finish_reason"] or self.end


class Endpoint:
    """The first machine, with one engine core and the HTTP server, and another one that joins it."""

    def __init__(
        self, places: Any, launch: Callable[..., Any], folder: Path, model: list[str], port: int, *first_options: str
    ) -> None:
        self._places, self._launch, self._first_options = places, launch, first_options
        self._uds = folder / "http.sock"
        key_file = folder / "cluster.key"
        command = [sys.executable, "-m", "llmstack_command", "cluster-key", str(key_file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        # Two engine cores in place of four, and a shorter time: the rest is what the page says.
        values = {
            "-dp": "2", "--data-parallel-size-local": "1", "--data-parallel-address": places.address,
            "--cluster-key-file": str(key_file),
        }  # fmt: skip
        further = ["--data-parallel-rpc-port", str(port), "--cluster-timeout", "1"]
        page = ("deployment.md", "Several machines")
        self._options = [*model, *options_of(*page, 0, values), *further]
        self._other_options = [*model, *options_of(*page, 1, values | {"--data-parallel-start-rank": "1"}), *further]
        self._env = {"XDG_RUNTIME_DIR": str(folder)}
        self.other = self.start_other()  # the other machine may come first
        self.first = self.start_first()
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._uds)), base_url="http://first", timeout=60
        )
        self.wait_until_ready()

    @property
    def num_processes(self) -> int:
        return int(self._first_options[-1]) if self._first_options else 1

    def start_first(self) -> Any:
        options = [*self._options, "--uds", str(self._uds), *self._first_options]
        return self._launch(*options, env=self._env, prefix=self._places.prefix("first"))

    def wait_until_ready(self) -> None:
        self.wait_until_both_serve(1)
        self.first.wait_for(lambda: self.client.get("/ready").status_code == 200, "ready server")

    def start_other(self, *arguments: str) -> Any:
        options = [*self._other_options, *arguments]
        return self._launch(*options, env=self._env, prefix=self._places.prefix("other"))

    def processes_of_other(self) -> list[psutil.Process]:
        own = psutil.Process(self.other.process.pid)
        return [own, *own.children(recursive=True)]

    def processes_of_first(self) -> list[psutil.Process]:
        return psutil.Process(self.first.process.pid).children(recursive=True)

    def signal_other(self, number: signal.Signals) -> None:
        """To all of its processes at once, as where a machine stops."""
        for process in self.processes_of_other():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def read(
        self, meanwhile: Callable[[], None] | None = None, *, num_chunks: int = 5, max_tokens: int = 200
    ) -> list[str]:
        """The texts of a few streams, of which half begin on each machine."""
        streams = [Stream(self.client, number, max_tokens) for number in range(4)]
        for stream in streams:
            stream.start()
        if meanwhile is not None:
            self.first.wait_for(lambda: min(one.num_chunks for one in streams) >= num_chunks, "running streams")
            if self.num_processes == 1:
                assert [self.num_running(index) for index in (0, 1)] == [2, 2]
            meanwhile()
        for stream in streams:
            stream.join(90)
        assert [stream.end for stream in streams] == ["length"] * 4
        return [stream.text for stream in streams]

    def num_running(self, engine: int) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        name = f'llmstack:num_requests_running{{engine="{engine}"'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait_until_both_serve(self, num_joins: int) -> None:
        self.first.wait_for(
            lambda: self.first.log.count(" serves") == num_joins * self.num_processes, "return of the other machine"
        )
