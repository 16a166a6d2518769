"""The command line of `llmstack bench`."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.commands import BenchCommand
from llmstack_bench.testing import Behaviour, FakeServer
from llmstack_command.main import main

HEAVY = ["aiohttp", "asyncio", "tqdm", "llmstack_llm", "torch", "matplotlib", "numpy"]


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


@pytest.mark.parametrize("line", [["--help"], ["bench", "serve", "--help"], ["bench", "serve", "--prot", "1"]])
def test_parsing_imports_nothing_heavy(line: list[str]) -> None:
    script = (
        "import sys\nfrom llmstack_command.main import main\n"
        f"try:\n    main({line!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_wrong_flag_of_a_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", "--num-promts", "3") == 2
    assert capsys.readouterr().err == (
        "llmstack bench serve: error: unknown flag '--num-promts'; did you mean '--num-prompts'?\n"
    )


def test_every_subcommand_says_its_flags_for_shell_completion() -> None:
    for name, (line, subcommand) in BenchCommand().subcommands().items():
        parser = argparse.ArgumentParser(prog=name)
        subcommand.add_arguments(parser)
        assert line
        assert parser.format_help().count("\n  --") > 1


def test_a_wrong_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serv") == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err


def test_serve_reports_a_run_and_writes_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "result.json"
    with FakeServer() as server:
        code = bench(
            "serve", "--base-url", server.url, "--num-prompts", "5", "--random_input_len", "7",
            "--random-output-len", "3", "--output-json", str(path), "--save-detailed", "--disable-tqdm",
        )  # fmt: skip
    assert code == 0
    result = json.loads(path.read_text())
    run: dict[str, Any] = result["servers"][0]["runs"][0]
    assert (run["completed"], run["failed"]) == (5, 0)
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (35, 15)
    assert len(run["requests"]) == 5
    assert all(record["num_chunks"] == 3 and len(record["token_gaps_s"]) == 2 for record in run["requests"])
    assert "time to first token p99 (ms)" in capsys.readouterr().out


def test_a_server_that_refuses_ends_the_command_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Behaviour(status=429)) as server:
        assert bench("serve", "--base-url", server.url, "--label", "busy", "--num-prompts", "2") == 1
    error = capsys.readouterr().err
    assert "busy" in error
    assert "HTTP 429: configured to refuse" in error
