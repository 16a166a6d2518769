"""torchrun starts the ranks of one model: the page's commands, with the tokens of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_commands import commands_of
from server_calls import complete_all

PORT = 29640
SIZES = pytest.mark.parametrize("size", ["-tp", "-pp"])


def launched(number: int, values: dict[str, str]) -> tuple[list[str], list[str]]:
    """The launcher and the options of the n-th command of the page, with other values for some that it has."""
    words = [values.get(word, word) for word in commands_of("deployment.md", "torchrun")[number]]
    first = words.index("llmstack")
    assert (words[0], words[first : first + 3]) == ("torchrun", ["llmstack", "serve", "MODEL"])
    return [sys.executable, "-m", "torch.distributed.run", *words[1:first]], words[first + 3 :]


@pytest.fixture(scope="module")
def expected(serve: Callable[..., Any]) -> list[str]:
    with serve("--dtype", "float32") as server:
        return complete_all(server)


@contextmanager
def stopped(*servers: Any) -> Iterator[None]:
    """Ends torchrun by the signal that it passes on; a killed one would leave what it has started."""
    try:
        yield
    finally:
        for server in servers:
            server.stop()


def ranks(server: Any) -> str:
    (engine,) = server.get_json("/server_info")["engines"]
    return str(engine["backends"]["ranks"])


@pytest.mark.full
@SIZES
def test_processes_of_one_machine_serve_as_one(launch: Callable[..., Any], expected: list[str], size: str) -> None:
    launcher, options = launched(0, {"-tp": size})
    server = launch(*options, "--dtype", "float32", prefix=launcher)
    with stopped(server):
        server.wait_until_ready()
        assert ranks(server).endswith("SharedMemoryExchange")
        assert complete_all(server) == expected
        assert server.log.count("the first starts all ranks") == 1


@pytest.mark.full
@SIZES
def test_machines_serve_as_one(launch: Callable[..., Any], expected: list[str], size: str, tmp_path: Path) -> None:
    key_file = str(tmp_path / "cluster.key")
    subprocess.run([sys.executable, "-m", "llmstack_command", "cluster-key", key_file], check=True)
    machines = []
    for number in (1, 2):
        values = {"10.0.0.1": "127.0.0.1", "cluster.key": key_file, "-pp": size}
        launcher, options = launched(number, values)
        launcher.insert(-1, f"--master-port={PORT}")
        further = ["--dtype", "float32", "--master-port", str(PORT + 1), "--trust-cluster-network", "lo"]
        machines.append(launch(*options, *further, prefix=launcher))
    first, other = machines
    with stopped(first, other):
        first.wait_until_ready()
        assert ranks(first).endswith("NodesExchange")
        assert complete_all(first) == expected
        first.stop()
        assert other.process.wait(60) == 0  # it ends with the first machine
