"""`tools/run_together.py` runs all scripts that it is given, and says which failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = """
[tool.hatch.envs.default.scripts]
say = "echo said {args:nothing}"
stop = ["echo before", "exit 3", "echo after"]
both = ["say", "say {args}"]
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "run_together.py"
    spec = importlib.util.spec_from_file_location("run_together", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str) -> int:
    monkeypatch.setattr("sys.argv", ["run_together.py", *names])
    code: int = tool.main()
    return code


def test_a_script_is_expanded_as_hatch_does(tool: ModuleType) -> None:
    scripts = {"say": "echo said {args:nothing}", "both": ["say", "say {args}"]}
    assert list(tool.commands(scripts, "say")) == ["echo said nothing"]
    assert list(tool.commands(scripts, "both a b")) == ["echo said nothing", "echo said a b"]
    assert list(tool.commands(scripts, "ls {args}")) == ["ls {args}"]


def test_each_script_says_its_own_and_success_is_zero(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, monkeypatch, "say", "both") == 0
    printed = capsys.readouterr().out
    assert printed.count("said nothing\n") == 3
    assert printed.endswith("checks: 2 of 2 passed\n")


def test_one_that_fails_ends_itself_alone_and_the_whole_with_one(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, monkeypatch, "stop", "say") == 1
    printed = capsys.readouterr().out
    assert "before\nexit 3: exit code 3\n" in printed
    assert "after\n" not in printed
    assert "said nothing\n" in printed
    assert printed.endswith("checks: 1 of 2 passed; failed: stop\n")


def test_an_unknown_name_is_refused_by_name(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"not a script of pyproject\.toml: absent"):
        run(tool, monkeypatch, "say", "absent")
