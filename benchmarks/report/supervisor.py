"""Keeps a worker running until every block has ended: kills what is stuck, replaces what has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from report.blocks import Block
from report.journal import Journal, Results

BENCHMARKS = Path(__file__).resolve().parent.parent
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked for.

    Attributes:
        deadline_s: Monotonic seconds after which no block starts, and none goes on.
    """

    part: str
    is_smoke: bool
    deadline_s: float


def sources() -> list[str]:
    """The source folders of the repository, so that nothing need be installed."""
    return [str(path) for path in sorted(BENCHMARKS.parent.glob("packages/*/src"))]


def worker_environment(settings: Settings) -> dict[str, str]:
    """The sources on the path; in a smoke run Triton's interpreter, in which the kernels' part then runs."""
    given = os.environ.get("PYTHONPATH")
    helpers = [str(BENCHMARKS.parent / "packages/model-runner/tests/helpers")] if settings.is_smoke else []
    path = os.pathsep.join([str(BENCHMARKS), *sources(), *helpers, *([given] if given else [])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if settings.is_smoke:
        environment["TRITON_INTERPRET"] = "1"
        if settings.part == "kernels":
            environment["LLMSTACK_KERNELS"] = "triton"
    return environment


def worker_command(settings: Settings, blocks: list[Block], journal: Journal) -> list[str]:
    """What starts a worker."""
    command = [sys.executable, "-m", "report.worker", "--part", settings.part, "--journal", str(journal.path)]
    command += ["--blocks", "|".join(block.name for block in blocks), "--deadline", str(settings.deadline_s)]
    return command + (["--smoke"] if settings.is_smoke else [])


def run(settings: Settings, blocks: list[Block], journal: Journal) -> Results:
    """Runs all blocks that fit; each has an outcome afterwards."""
    while remaining := _remaining(blocks, journal):
        num_ended = len(blocks) - len(remaining)
        exit_code = _run_worker(settings, remaining, journal)
        results = Results.read(journal)
        if results.under_way is not None:
            name, started_s = results.under_way
            _end(journal, name, _cause(settings, exit_code), time.monotonic() - started_s)
        if len(Results.read(journal).outcomes) == num_ended:  # it cannot even start: nor will the next one
            for block in remaining:
                _end(journal, block.name, f"failed: the worker ended with {exit_code} before it", 0.0)
    return Results.read(journal)


def _remaining(blocks: list[Block], journal: Journal) -> list[Block]:
    outcomes = Results.read(journal).outcomes
    return [block for block in blocks if block.name not in outcomes]


def _end(journal: Journal, name: str, outcome: str, seconds: float) -> None:
    journal.write("end", block=name, outcome=outcome, seconds=seconds)
    print(f"== {name}: {outcome}", flush=True)


def _cause(settings: Settings, exit_code: int) -> str:
    if time.monotonic() >= settings.deadline_s:
        return "stopped: the budget was spent"
    if exit_code == -signal.SIGKILL:
        return "stopped: it took far longer than it should"
    return f"failed: its process ended with {exit_code}"


def _run_worker(settings: Settings, blocks: list[Block], journal: Journal) -> int:
    """Exit code of a worker that runs `blocks`, killed where one of them is stuck."""
    command = worker_command(settings, blocks, journal)
    # A group of its own, since compilers start processes too; no session of its own, so that it ends with ours.
    worker = subprocess.Popen(command, env=worker_environment(settings), process_group=0)
    try:
        while worker.poll() is None:
            time.sleep(POLL_S)
            if _is_stuck(settings, blocks, Results.read(journal)):
                _kill(worker)
        return worker.wait()
    finally:
        _kill(worker)


def _is_stuck(settings: Settings, blocks: list[Block], results: Results) -> bool:
    now_s = time.monotonic()
    if now_s >= settings.deadline_s:
        return True
    if results.under_way is None:
        return False
    name, started_s = results.under_way
    return any(block.name == name and now_s - started_s > block.limit_s for block in blocks)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
