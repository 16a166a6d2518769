"""Runs the repository's own tests that need a GPU, where pytest is installed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from report.bench import Bench
from report.rows import Row
from report.supervisor import BENCHMARKS


def run(bench: Bench) -> None:
    """Test files of Triton's kernels, and others that name a GPU; on a card they run compiled, in bfloat16 too."""
    if importlib.util.find_spec("pytest") is None:
        bench.row(Row("tests failed", "failed", note="pytest is not installed"))
        return
    packages = BENCHMARKS.parent / "packages"
    files = bench.pick(_files(packages), [packages / "kernels" / "tests" / "test_rms_norm_triton.py"])
    # The repository's settings name plug-ins that need not be there.
    command = [sys.executable, "-m", "pytest", "-q", "-x" if bench.is_smoke else "-q", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", str(packages), "--import-mode=importlib", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(30, bench.remaining_s()))
    bench.say(done.stdout[-6000:])
    if done.returncode > 1:
        bench.say(done.stderr[-2000:])
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    num_failed = sum(count for word, count in counts.items() if word not in ("passed", "skipped"))
    note = ", ".join(f"{count} {word}" for word, count in counts.items()) or f"pytest ended with {done.returncode}"
    measured = float(num_failed) if counts else None
    bench.row(Row("tests failed", "failed", measured, note=note))


def _files(packages: Path) -> list[Path]:
    everything = sorted(packages.glob("*/tests/test_*.py"))
    return [path for path in everything if path.stem.endswith("_triton") or "mark.gpu" in path.read_text("utf-8")]
