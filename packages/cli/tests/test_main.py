"""The command line as a user meets it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_command import discovery
from llmstack_command.main import main
from llmstack_command.testing import installed_commands

HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "pydantic", "uvicorn", "zmq", "jinja2")

GREET = """
class GreetCommand:
    name = "greet"
    help = "greet somebody"

    def add_arguments(self, parser):
        parser.add_argument("who")
        parser.add_argument("--num-times", type=int, default=1)
        parser.add_argument("--tone", choices=["friendly", "formal"], default="friendly")
        parser.add_argument("--hidden-flag", help="==SUPPRESS==")

    def run(self, namespace):
        print(f"{namespace.tone}: " + " ".join(["hello", namespace.who] * namespace.num_times))
        return 0 if namespace.who != "nobody" else 7
"""


@pytest.fixture
def _greet(tmp_path: Path):
    (tmp_path / "greeting_plugin.py").write_text(GREET)
    with installed_commands(tmp_path, {"greet": "greeting_plugin:GreetCommand"}):
        yield
    sys.modules.pop("greeting_plugin", None)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch):
    """As if no other package of the stack were installed."""
    monkeypatch.setattr(discovery, "OF_PACKAGES", {})
    monkeypatch.setattr("llmstack_command.discovery.find_entry_points", lambda group: [])


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("llmstack ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert "versions" in capsys.readouterr().out


@pytest.mark.usefixtures("_greet")
def test_a_third_party_command_is_listed_and_runs(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "greet somebody" in capsys.readouterr().out
    assert main(["greet", "you", "--num-times", "2"]) == 0
    assert capsys.readouterr().out == "friendly: hello you hello you\n"


@pytest.mark.usefixtures("_greet")
def test_the_exit_code_is_the_commands():
    assert main(["greet", "nobody"]) == 7


@pytest.mark.usefixtures("_greet")
@pytest.mark.parametrize("flag", ["--num_times", "--num-times"])
def test_underscores_and_dashes_name_the_same_flag(flag: str, capsys: pytest.CaptureFixture[str]):
    assert main(["greet", "a_b", flag + "=1", "--tone", "formal"]) == 0
    assert capsys.readouterr().out == "formal: hello a_b\n"


@pytest.mark.usefixtures("_greet")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["greet", "you", "--num-tmes", "2"], ["'--num-tmes'", "'--num-times'"]),
        (["greet", "you", "--zzz"], ["'--zzz'", "llmstack greet --help"]),
        (["greet", "you", "--hidden-flg"], ["'--hidden-flg'", "--help"]),
        (["greet", "you", "--num-times", "two"], ["--num-times", "'two'"]),
        (["greet", "you", "--num-times"], ["--num-times", "expected one argument"]),
        (["greet", "you", "--tone", "fromal"], ["--tone", "'fromal'", "'formal'"]),
        (["greet", "you", "--tone", "qqq"], ["--tone", "'qqq'", "friendly, formal"]),
        (["greet"], ["who"]),
        (["greet", "you", "too"], ["'too'"]),
        (["greeet"], ["'greeet'", "'greet'"]),
        (["qqqqqq"], ["'qqqqqq'", "greet"]),
        (["--versoin"], ["'--versoin'", "'--version'"]),
        (["--port", "1"], ["'--port'", "llmstack --help"]),
    ],
)
def test_a_wrong_line_exits_with_2_and_one_line_naming_the_fault(
    line: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.usefixtures("_alone")
def test_without_a_provider_it_says_what_to_install(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "gpt2"]) == 1
    assert "pip install llmstack-server" in capsys.readouterr().err
    assert main([]) == 0
    assert "pip install llmstack-server" in capsys.readouterr().out


def test_a_command_that_cannot_be_imported_spoils_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with installed_commands(tmp_path, {"broken": "no_such_module_anywhere:Command"}):
        assert main([]) == 0
        shown = capsys.readouterr().out
        assert main(["broken"]) == 1
    assert "versions" in shown
    assert "no_such_module_anywhere" in shown
    assert "cannot be loaded" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch):
    def interrupt(self: object, namespace: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmstack_command.builtin.VersionsCommand.run", interrupt)
    assert main(["versions"]) == 130


@pytest.mark.parametrize(
    "line", [["--help"], ["--version"], ["versions", "--help"], ["--nonsense"], ["chat", "--help"], ["collect-env"]]
)
def test_it_answers_without_importing_anything_heavy(line: list[str]):
    program = (
        "import json, sys; sys.stdout = sys.stderr\n"
        "from llmstack_command.main import main\n"
        "try:\n main(sys.argv[1:])\nexcept SystemExit:\n pass\n"
        "sys.__stdout__.write(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, check=True)
    imported = json.loads(ran.stdout)
    assert [name for name in HEAVY if name in imported] == []


def test_it_runs_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "llmstack_command", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("llmstack ")
