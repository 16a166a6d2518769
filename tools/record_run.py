"""Runs a target of the Makefile and records what it tested, for the table of last runs in CONTRIBUTING.md.

    python tools/record_run.py test          runs `make test`, and writes a row into tools/last_runs.json
    python tools/record_run.py test -- CMD   runs CMD in its place, such as the same tests in another environment
    python tools/record_run.py --check       exit code 1 where CONTRIBUTING.md is not written from that file

A run is recorded with its failures, and only from a tree without uncommitted changes: the row names the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmstack_command.collect_env.machine import cpu_facts

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("tools", "last_runs.json")
PAGE = Path("CONTRIBUTING.md")
BEGIN, END = "<!-- last runs: begin (tools/record_run.py) -->\n", "<!-- last runs: end -->\n"
COLUMNS = "| command | when, UTC | commit | processor | tests | minutes |\n|---|---|---|---|---|---|\n"
# The order of the sentence on the tests. Other words of pytest, such as `warnings`, are not counted.
OUTCOMES = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
# The last line of each run of pytest, also without the frame that `--quiet` leaves out.
SUMMARY = re.compile(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s")

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Run tests, and record the run.")
    parser.add_argument("target", nargs="?", help="a target of the Makefile, such as test or test-full")
    parser.add_argument("command", nargs="*", help="what runs in its place, after `--`")
    parser.add_argument("--check", action="store_true", help="only compare CONTRIBUTING.md with the recorded runs")
    options = parser.parse_args(arguments)
    if options.check:
        return check(root)
    if options.target is None:
        parser.error("a target is needed, such as test")
    return record(options.target, options.command or ["make", options.target], root)


def record(target: str, command: Sequence[str], root: Path) -> int:
    """Runs the command, and records it; its exit code, or 2 where nothing could be recorded."""
    if _git(root, "status", "--porcelain"):
        print("record_run: the tree has uncommitted changes, so that no commit would describe what was tested")
        return 2
    started, began = datetime.now(UTC), time.monotonic()
    exit_code, counts = _run(command, root)
    minutes = (time.monotonic() - began) / 60
    if not counts:
        print("record_run: no run of pytest has ended, so that there is nothing to record")
        return exit_code or 2
    row = {
        "when": f"{started:%Y-%m-%d %H:%M}", "commit": _git(root, "rev-parse", "--short=8", "HEAD"),
        "processor": processor(), "tests": dict(counts), "minutes": round(minutes, 1),
    }  # fmt: skip
    path = root / DATA
    runs = json.loads(path.read_text(encoding="utf-8")) | {target: row}
    path.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (root / PAGE).write_text(_page(root), encoding="utf-8")
    return exit_code


def check(root: Path) -> int:
    """Whether the table is written from the recorded runs; the exit code."""
    is_current = (root / PAGE).read_text(encoding="utf-8") == _page(root)
    if not is_current:
        print(f"{PAGE} is not written from {DATA}: python tools/record_run.py writes both")
    return 0 if is_current else 1


def counts_of(lines: Iterable[str]) -> Counter[str]:
    """Outcome to number of tests, over all runs of pytest whose output this is."""
    counts: Counter[str] = Counter()
    for line in lines:
        found = SUMMARY.match(line)
        for number, word in re.findall(r"(\d+) (\w+)", found[1]) if found else ():
            outcome = "error" if word == "errors" else word
            if outcome in OUTCOMES:
                counts[outcome] += int(number)
    return counts


def table(runs: dict[str, Row]) -> str:
    """The table of CONTRIBUTING.md, a row for each target."""
    return COLUMNS + "".join(_row(target, runs[target]) for target in sorted(runs))


def processor() -> str:
    """Number and kind of the processors that the tests may use, by the instructions that decide which kernels run."""
    facts = cpu_facts()
    features = facts["features"].split()
    kinds = {"avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
    kind = next((text for name, text in kinds.items() if name in features), "neither AVX-512 nor AVX2")
    return f"{len(os.sched_getaffinity(0))} × {facts['model']}, {kind}"


def _row(target: str, row: Row) -> str:
    tests = ", ".join(f"{row['tests'][outcome]:,} {outcome}" for outcome in OUTCOMES if row["tests"].get(outcome))
    return (
        f"| `make {target}` | {row['when']} | {row['commit']} | {row['processor']} | {tests} | {row['minutes']:g} |\n"
    )


def _page(root: Path) -> str:
    text = (root / PAGE).read_text(encoding="utf-8")
    runs = json.loads((root / DATA).read_text(encoding="utf-8"))
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table(runs)}{END}{rest.partition(END)[2]}"


def _run(command: Sequence[str], root: Path) -> tuple[int, Counter[str]]:
    """Runs it, and shows what it prints; the exit code, and the counts."""
    lines = []
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if SUMMARY.match(line):
                lines.append(line)
    return process.returncode, counts_of(lines)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
