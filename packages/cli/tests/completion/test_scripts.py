"""The scripts, run by the shells they are for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmstack_command.completion.bash import bash_script
from llmstack_command.completion.fish import fish_script
from llmstack_command.completion.tree import Level
from llmstack_command.completion.zsh import zsh_script
from llmstack_command.main import main

CASES = [
    ("llmstack ", {"run", "group", "--help", "--version"}),
    ("llmstack gr", {"group"}),
    ("llmstack run --", {"--dtype", "--output-file", "--port", "--eager", "--no-eager"}),
    ("llmstack run --dty", {"--dtype"}),
    ("llmstack run --dtype ", {"float16", "float32"}),
    ("llmstack run --dtype = float3", {"float32"}),  # bash cuts words at the equals sign
    ("llmstack run --output-file ", {"a file", "folder"}),
    ("llmstack run -o fo", {"folder"}),
    ("llmstack run --port ", set()),
    ("llmstack run ", {"a file", "folder"}),
    ("llmstack group ", {"inner", "other"}),
    ("llmstack group inner --", {"--depth"}),
    ("llmstack group inner --depth ", {"1", "2"}),
    ("llmstack group other --", set()),
    ("llmstack unheard --", set()),
]


def require(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"needs {shell}, which is not installed")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to complete files in."""
    (tmp_path / "a file").touch()
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes(line: str, expected: set[str], levels: list[Level], folder: Path):
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"{bash_script(levels)}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _llmstack\n"
        'for reply in "${COMPREPLY[@]}"; do printf "%s\\n" "$reply"; done'
    )
    ran = subprocess.run([require("bash"), "-c", program], cwd=folder, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert set(ran.stdout.splitlines()) == expected


@pytest.mark.parametrize(("line", "expected"), [case for case in CASES if " = " not in case[0] and case[1]])
def test_fish_completes(line: str, expected: set[str], levels: list[Level], folder: Path):
    program = f"{fish_script(levels)}\ncomplete -C '{line}'"
    ran = subprocess.run([require("fish"), "-Nc", program], cwd=folder, capture_output=True, text=True, timeout=30)
    assert ran.stderr == ""
    shown = {row.partition("\t")[0].rstrip("/") for row in ran.stdout.splitlines()}
    assert expected - {"--help", "--version"} <= shown


def test_zsh_accepts_its_script(levels: list[Level]):
    program = "autoload -U compinit; compinit -D -u\n" + zsh_script(levels) + '\nprint -r -- "$_comps[llmstack]"'
    ran = subprocess.run([require("zsh"), "-fc", program], capture_output=True, text=True, timeout=30)
    assert (ran.stdout, ran.stderr) == ("_llmstack\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_prints_a_script_that_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("chat", "collect-env", "system-prompt", "versions"))


def test_nothing_is_started_when_a_key_is_pressed(levels: list[Level]):
    """No script calls the command: that would cost a fifth of a second at every key."""
    for write in (bash_script, zsh_script, fish_script):
        script = write(levels)
        assert "python" not in script
        assert "$(llmstack" not in script
        assert "(llmstack" not in script


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "basch"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
