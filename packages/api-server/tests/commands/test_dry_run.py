"""`--dry-run`: every reason at once, with assumed devices and models."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_llm.testing import write_model_folder
from llmstack_server.commands import ServeCommand


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServeCommand().add_arguments(parser)
    return parser.parse_args(line)


def problems_of(*line: str) -> tuple[list[str], argparse.Namespace]:
    namespace = parse(*line, "--dry-run")
    return ServeCommand().problems(namespace), namespace


def test_all_that_is_missing_is_reported_together_after_the_table(capsys: pytest.CaptureFixture[str]):
    problems, namespace = problems_of(
        "org/model", "--assume-model", "--assume-devices", "8x80GiB", "-dp", "16", "--enable-lora-bias", "--port", "x",
        "--tool-call-parser", "nonsense", "--logits-processors", "no_such_module.inner:Processor",
        "--moe-backend", "triton",
    )  # fmt: skip
    assert [problem.split()[0].rstrip(":") for problem in problems] == [
        "--enable-lora-bias", "--port", "--tool-call-parser", "--data-parallel-size", "--logits-processors",
    ]  # fmt: skip
    assert namespace.exit_code == 1
    written = capsys.readouterr()
    assert "--moe-backend" in written.out
    assert "command line, no effect: kernels of linear layers" in written.out
    assert "--data-parallel-size 16 needs 16 devices, and there are 8" in problems[3]


def test_a_line_without_anything_missing_ends_with_0_and_starts_nothing(capsys: pytest.CaptureFixture[str]):
    problems, namespace = problems_of("org/model", "--assume-model", "--assume-devices", "8x80GiB", "-dp", "8")
    assert (problems, ServeCommand().run(namespace)) == ([], 0)
    assert capsys.readouterr().out.count("--data-parallel-size ") == 1


@pytest.mark.parametrize(
    "line",
    [
        "-tp 8 -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key-file k",
        "-dp 16 -dpl 8 -dpa 10.0.0.1 --cluster-key-file k",
        "-dp 16 -dpl 8 -dpr 8 -dpa 10.0.0.1 --cluster-key-file k --headless",
        "-tp 16 --distributed-executor-backend ray --trust-cluster-network eth0 --cluster-key-file k",
    ],
)
def test_only_the_devices_of_this_machine_are_counted(line: str, capsys: pytest.CaptureFixture[str]):
    assumed = ("--assume-model", "--assume-devices", "8x80GiB")
    assert problems_of("org/model", *line.split(), *assumed)[0] == []
    [problem] = problems_of("org/m", *line.split(), *assumed[:2], "4x80GiB")[0] or ["the cluster's: and there are 4"]
    assert problem.endswith("and there are 4")


@pytest.mark.parametrize("text", ["8", "x80GiB", "8x", "8x80MiB", "0x80GiB", "8x80GiBs"])
def test_assumed_devices_have_one_form(text: str, capsys: pytest.CaptureFixture[str]):
    [problem] = problems_of("org/model", "--assume-model", "--assume-devices", text)[0]
    assert problem.startswith(f"--assume-devices: '{text}' is not a number of devices")


def test_assumptions_are_for_dry_runs():
    assert ServeCommand().problems(parse("--assume-model")) == ["--assume-model needs --dry-run"]


def test_a_dry_run_of_a_published_line_imports_no_torch():
    program = (
        "import sys\n"
        "from llmstack_command.main import main\n"
        "line = 'serve org/m -tp 1 --dry-run --assume-model --assume-devices 8x80GiB --moe-backend triton -O3 "
        "-cc.pass_config.fuse=True --reasoning-parser qwen3 --trust-remote-code'\n"
        "code = main(line.split())\n"
        "late = ('torch', 'transformers', 'uvicorn', 'zmq', 'importlib.metadata', 'email', 'socket')\n"
        "print([name for name in late if name in sys.modules], code)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[] 0"


def test_parsing_a_line_imports_nothing_that_only_a_running_server_needs():
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from llmstack_command.discovery import find_command\n"
        "from llmstack_command.parser import CommandParser\n"
        "command = find_command('serve').load()\n"
        "parser = CommandParser(prog='llmstack serve', description=command.help)\n"
        "command.add_arguments(parser)\n"
        "parser.parse_line(['gpt2', '--max_model_len', '4k', '-O3', '-cc.mode', '3'])\n"
        "print(*set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = ran.stdout.split()
    packages = {name.partition(".")[0] for name in imported}
    assert "llmstack_llm.engine_args" in imported
    assert {name for name in packages if name.startswith("llmstack")} == {
        "llmstack_command", "llmstack_llm", "llmstack_server", "llmstack_types",
    }  # fmt: skip
    # Each costs up to some milliseconds of a start that has fifty.
    slow = {"asyncio", "concurrent", "email", "hashlib", "http", "logging", "multiprocessing", "pathlib", "socket"}
    slow |= {"ssl", "subprocess", "tempfile", "unittest", "urllib", "uuid", "numpy", "pydantic", "yaml"}
    assert not packages & slow
    assert "importlib.metadata" not in imported


def test_the_code_of_a_repository_is_a_reason_unless_we_have_its_model(tmp_path: Path):
    folder = write_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    problems, _ = problems_of(str(folder), "--trust-remote-code")
    assert any("code from a repository never runs" in problem and "MineForCausalLM" in problem for problem in problems)
    assert not any("never runs" in problem for problem in problems_of(str(folder))[0])
