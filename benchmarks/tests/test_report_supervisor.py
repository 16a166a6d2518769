"""Workers that die, hang or cannot start do not end the report."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from report import supervisor
from report.blocks import Block
from report.journal import Journal, Results


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def workers(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> list[list[str]]:
    """Workers in place of the real ones, one script each; returns the names of blocks that each was given."""
    given: list[list[str]] = []
    prelude = "import sys, time, os\nfrom pathlib import Path\nfrom report.journal import Journal\n"
    prelude += "journal = Journal(Path(sys.argv[1]))\n"

    def command(_: supervisor.Settings, blocks: list[Block], journal: Journal) -> list[str]:
        given.append([block.name for block in blocks])
        return [sys.executable, "-c", prelude + scripts[len(given) - 1], str(journal.path)]

    monkeypatch.setattr(supervisor, "worker_command", command)
    return given


START_A = "journal.write('start', block='a', at_s=time.monotonic())\n"
END_B = "journal.write('start', block='b', at_s=time.monotonic())\n"
END_B += "journal.write('end', block='b', outcome='done', seconds=1)\n"
TWO_BLOCKS = [Block("a", 1, ""), Block("b", 1, "")]


def settings() -> supervisor.Settings:
    return supervisor.Settings("kernels", is_smoke=False, deadline_s=time.monotonic() + 60)


def test_the_block_a_worker_died_in_has_failed_and_another_worker_does_the_rest(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = workers(monkeypatch, START_A + "os._exit(7)", END_B)
    outcomes = supervisor.run(settings(), TWO_BLOCKS, journal).outcomes
    assert outcomes == {"a": "failed: its process ended with 7", "b": "done"}
    assert given == [["a", "b"], ["b"]]


def test_a_stuck_block_is_stopped_and_another_worker_does_the_rest(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = workers(monkeypatch, START_A + "time.sleep(600)", END_B)
    blocks = [Block("a", -29.9, ""), TWO_BLOCKS[1]]  # which makes its limit 0.2 s
    outcomes = supervisor.run(settings(), blocks, journal).outcomes
    assert outcomes == {"a": "stopped: it took far longer than it should", "b": "done"}
    assert given == [["a", "b"], ["b"]]


def test_the_budget_ends_a_block(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    workers(monkeypatch, START_A + "time.sleep(600)", "")
    begun: list[bool] = []

    def monotonic() -> float:  # an hour passes once the first block has begun
        if not begun and Results.read(journal).under_way is not None:
            begun.append(True)
        return time.monotonic() + 3600 * len(begun)

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    outcomes = supervisor.run(settings(), TWO_BLOCKS, journal).outcomes
    assert outcomes["a"] == "stopped: the budget was spent"
    assert outcomes["b"].startswith("failed: the worker ended")


def test_workers_that_cannot_start_are_not_started_for_ever(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    given = workers(monkeypatch, "os._exit(1)")
    outcomes = supervisor.run(settings(), TWO_BLOCKS, journal).outcomes
    assert outcomes == dict.fromkeys("ab", "failed: the worker ended with 1 before it")
    assert len(given) == 1
