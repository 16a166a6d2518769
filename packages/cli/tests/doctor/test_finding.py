"""Findings, and how other packages are asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_command.doctor.finding import Finding, from_sentence, guarded, module_of_file, package_module


def test_a_sentence_of_the_stack_is_a_cause_and_a_remedy():
    found = from_sentence("port", "problem", "port 1 is in use; choose another one.")
    assert (found.text, found.remedy) == ("port 1 is in use", "choose another one")
    assert from_sentence("start", "problem", "There is no folder /nope.").remedy == ""


def test_a_check_that_fails_is_a_problem_with_its_reason():
    def fail() -> Iterator[Finding]:
        yield Finding("x", "ok", "first")
        raise OSError("a library\nis broken")

    assert guarded("x", fail) == [Finding("x", "problem", "cannot be checked: OSError: is broken")]


def test_a_module_of_a_missing_package_is_none():
    assert package_module("llmstack_of_nobody.x") is None
    assert module_of_file("llmstack_of_nobody", "x.py") is None


def test_a_module_of_a_file_does_not_import_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('slow')")
    (package / "quick.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = module_of_file("slow_package", "quick.py")
    assert module is not None
    assert module.VALUE == 7
    assert "slow_package" not in sys.modules
