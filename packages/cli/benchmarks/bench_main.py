"""What a user waits for before anything is done."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_command.main import main


@pytest.mark.parametrize("line", ["--help", "--version", "serve --help"])
def test_a_fresh_process(benchmark: BenchmarkFixture, line: str):
    benchmark(subprocess.run, [sys.executable, "-m", "llmstack_command", *line.split()], capture_output=True)


def test_dispatch_in_a_warm_process(benchmark: BenchmarkFixture):
    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--version"])

    benchmark(run)
