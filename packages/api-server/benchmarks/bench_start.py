"""The start of a server by stage, of several source trees in turns.

`python bench_start.py --tree A --tree B -- llmstack serve --port {port}`; without `--tree` it measures what is
installed. Wall time counts only where the processors are idle; processor time is shown beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.005
TIMEOUT_S = 120.0
STAGE = re.compile(r'^llmstack:startup_seconds\{stage="([^"]+)"\} (\S+)$', re.MULTILINE)
DEFAULT_COMMAND = [sys.executable, "-m", "llmstack_command", "serve", "llmstack-demo", "--port", "{port}"]


@dataclass(frozen=True, slots=True)
class Start:
    """One start: name of a figure to seconds, or MiB."""

    figures: dict[str, float]


def measure(command: list[str], tree: str) -> Start:
    """Starts the server once, from its creation to the first 200 of `/health`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The first start writes bytecode, as an installation does; compiling in each start would be measured otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if tree:
        sources = [str(path) for path in sorted(Path(tree).resolve().glob("packages/*/src"))]
        environment["PYTHONPATH"] = os.pathsep.join(sources)
    with running([word.replace("{port}", str(port)) for word in command], environment) as process:
        started_s = time.perf_counter()
        while get(port, "/health")[0] != 200:
            if process.poll() is not None or time.perf_counter() - started_s > TIMEOUT_S:
                raise SystemExit(f"the server did not start: {command}")
            time.sleep(POLL_S)
        figures = {"ready: wall": time.perf_counter() - started_s}
        for name, pid in (("API process", process.pid), ("engine core", engine_core_of(process.pid))):
            figures[f"processor: {name}"] = processor_s(pid)
            figures[f"PSS MiB: {name}"] = pss_mib(pid)
        stages = STAGE.findall(get(port, "/metrics")[1])
        return Start(figures | {f"stage: {stage}": float(seconds) for stage, seconds in stages})


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The server, which is stopped at the end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]  # the same for both
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 where nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def engine_core_of(pid: int) -> int:
    """The child of a server; the server itself where it has none."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return int(children[0]) if children else pid


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    """Proportional resident memory of a process."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024


def main() -> None:
    """Prints the medians of all trees, side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[], help="a checkout whose sources are measured")
    parser.add_argument("--num-iters", type=int, default=7)
    parser.add_argument("command", nargs="*", default=DEFAULT_COMMAND)
    options = parser.parse_args()
    trees = options.tree or [""]
    starts: dict[str, list[Start]] = {tree: [] for tree in trees}
    for _ in range(options.num_iters + 1):
        for tree in trees:
            starts[tree].append(measure(options.command, tree))
    names = list(dict.fromkeys(name for tree in trees for name in starts[tree][-1].figures))
    for name in names:
        # The first start of each tree writes bytecode and fills the disk cache.
        values = [[start.figures[name] for start in starts[tree][1:] if name in start.figures] for tree in trees]
        print(f"{name:<32}", *(f"{statistics.median(column):9.3f}" if column else f"{'–':>9}" for column in values))


if __name__ == "__main__":
    main()
