"""Findings about what is installed."""

from __future__ import annotations

import importlib
import py_compile
from pathlib import Path

import pytest

from llmstack_command.doctor import software


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "doctors_patient"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def test_bytecode_that_is_not_kept_is_a_note_with_the_command_that_keeps_it(package: Path) -> None:
    (found,) = software.bytecode(False, [package.name])
    assert (found.state, found.remedy) == ("note", f"python -m compileall -q {package}")
    assert "PYTHONDONTWRITEBYTECODE" in found.text


def test_bytecode_that_exists_or_will_be_written_is_fine(package: Path) -> None:
    assert [one.state for one in software.bytecode(True, [package.name, "not_installed_anywhere"])] == ["ok"]
    py_compile.compile(str(package / "__init__.py"))
    assert [one.state for one in software.bytecode(False, [package.name])] == ["ok"]
