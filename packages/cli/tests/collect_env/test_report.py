"""The whole report."""

from __future__ import annotations

import json

import pytest

from llmstack_command.collect_env.report import render
from llmstack_command.main import main


def test_the_report_has_every_section(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert main(["collect-env", "--json"]) == 0
    printed = capsys.readouterr().out
    sections = json.loads(printed)
    assert list(sections) == [
        "system", "processor", "limits", "gpu", "python", "packages", "torch and kernels", "environment variables",
    ]  # fmt: skip
    assert sections["torch and kernels"]["torch"]
    assert "hf_very_secret" not in printed


def test_sections_are_laid_out_as_columns():
    assert render({"a": {"x": "1", "long": "2"}, "b": {}}) == "a\n  x     1\n  long  2\n\nb\n  (none)"
