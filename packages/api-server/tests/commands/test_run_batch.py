"""The subcommand before anything is run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_server.commands import RunBatchCommand
from llmstack_server.commands.batch.flags import add_batch_arguments

HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "pydantic", "uvicorn", "zmq", "jinja2", "tqdm")


def test_its_flags_are_known_without_importing_anything_heavy():
    program = (
        "import argparse, json, sys\n"
        "from llmstack_server.commands import RunBatchCommand\n"
        "RunBatchCommand().add_arguments(argparse.ArgumentParser())\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = json.loads(ran.stdout)
    assert [name for name in HEAVY if name in imported] == []


def test_an_input_that_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    namespace = parser.parse_args(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")])
    assert RunBatchCommand().run(namespace) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("llmstack run-batch: error: --input-file: ")
    assert errors.count("\n") == 1


def test_a_batch_without_requests_loads_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in").touch()
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    namespace = parser.parse_args(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "no/such/model"])
    assert RunBatchCommand().run(namespace) == 0
    assert capsys.readouterr().err == "no requests\n"
