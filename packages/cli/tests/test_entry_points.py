"""Entry points are found as `importlib.metadata` finds them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_command.entry_points import find_entry_points


def write(folder: Path, distribution: str, text: str) -> None:
    (folder / distribution).mkdir(parents=True)
    (folder / distribution / "entry_points.txt").write_text(text)


@pytest.mark.parametrize("group", ["llmstack.commands", "console_scripts", "pytest11"])
def test_they_are_those_of_the_standard_library(group: str):
    expected = {
        (entry.name, entry.value.partition("[")[0].strip()) for entry in importlib.metadata.entry_points(group=group)
    }
    assert set(find_entry_points(group)) == expected


def test_only_the_group_counts_and_comments_and_extras_do_not(tmp_path: Path):
    text = "[other]\nno = a:b\n\n[mine]\n# off = a:b\none = pkg.mod:One [extra]\n two=pkg:Two\n[last]\nno = c:d\n"
    write(tmp_path, "Some.Name-1.0.dist-info", text)
    assert find_entry_points("mine", [str(tmp_path)]) == [("one", "pkg.mod:One"), ("two", "pkg:Two")]


def test_of_a_distribution_that_is_on_the_path_twice_the_first_counts(tmp_path: Path):
    write(tmp_path / "a", "some_name-2.0.dist-info", "[g]\nx = new:X\n")
    write(tmp_path / "b", "Some.Name-1.0.dist-info", "[g]\nx = old:X\n")
    write(tmp_path / "b", "other.egg-info", "[g]\ny = other:Y\n")
    path = [str(tmp_path / "a"), str(tmp_path / "absent"), str(tmp_path / "b")]
    assert find_entry_points("g", path) == [("x", "new:X"), ("y", "other:Y")]


def test_what_cannot_be_read_has_none(tmp_path: Path):
    write(tmp_path, "bad-1.dist-info", "")
    (tmp_path / "bad-1.dist-info" / "entry_points.txt").write_bytes(b"[g]\nx = \xff:y\n")
    (tmp_path / "single.egg-info").write_text("Name: single\n")
    assert find_entry_points("g", [str(tmp_path)]) == []


def test_a_command_starts_without_the_module_of_the_standard_library():
    code = (
        "import sys\nfrom llmstack_command.main import main\n"
        "main(['--help'])\nprint([name for name in ('importlib.metadata', 'email', 'zipfile', 'shutil') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
