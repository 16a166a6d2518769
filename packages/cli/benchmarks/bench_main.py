"""What a user waits for before anything is done."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_command.completion.bash import bash_script
from llmstack_command.completion.tree import describe_commands
from llmstack_command.discovery import find_commands
from llmstack_command.main import main
from llmstack_command.parser import CommandParser


@pytest.mark.parametrize("line", ["--help", "--version", "serve --help"])
def test_a_fresh_process(benchmark: BenchmarkFixture, line: str):
    benchmark(subprocess.run, [sys.executable, "-m", "llmstack_command", *line.split()], capture_output=True)


def test_dispatch_in_a_warm_process(benchmark: BenchmarkFixture):
    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--version"])

    benchmark(run)


def test_parsing_a_line_of_the_largest_command(benchmark: BenchmarkFixture):
    """Less than a millisecond, once the parser stands."""
    command = find_commands()["serve"].load()
    parser = CommandParser(prog="llmstack serve", description=command.help)
    command.add_arguments(parser)
    benchmark(parser.parse_line, ["gpt2", "--max_model_len", "4k", "--port", "0", "--dtype", "float32"])


def test_a_key_press_in_bash(benchmark: BenchmarkFixture, tmp_path: Path):
    """A shell that reads the script again and completes once; less than 0.2 seconds."""
    script = tmp_path / "llmstack.bash"
    script.write_text(bash_script(describe_commands(find_commands())))
    program = f"source {script}; COMP_WORDS=(llmstack serve --dty); COMP_CWORD=2; _llmstack; echo $COMPREPLY"
    ran = benchmark(subprocess.run, ["bash", "-c", program], capture_output=True, text=True)
    assert ran.stdout == "--dtype\n"
