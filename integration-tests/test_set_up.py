"""The set-up of `make serve` and `make setup`: what it installs, what it says, and how it fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def set_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", ROOT / "tools" / "set_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def projects(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower() for text in requirements}


def test_a_server_gets_what_it_requires_and_no_developers_tools(set_up: ModuleType) -> None:
    names = projects(set_up.serving_requirements())
    assert {"torch", "fastapi", "uvicorn", "tokenizers", "pyzmq", "msgpack", "llguidance", "safetensors"} <= names
    assert not names & {"pytest", "ruff", "mypy", "transformers", "triton", "ray", "cryptography"}
    assert not any(name.startswith("llmstack") for name in names)


def test_a_server_gets_the_pinned_torch(set_up: ModuleType) -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = workspace["tool"]["hatch"]["envs"]["default"]["dependencies"]
    pinned = next(pin for pin in pins if pin.startswith("torch=="))
    assert pinned in set_up.serving_requirements()


def test_requirements_of_every_sibling_and_extra_are_found(set_up: ModuleType) -> None:
    table = {
        "llmstack-a": {"dependencies": ["llmstack-b[fast]>=0.2", "one>=1"]},
        "llmstack-b": {
            "dependencies": ["llmstack-a"],
            "optional-dependencies": {"fast": ["two>=2"], "slow": ["three"]},
        },
    }
    assert set(set_up.requirements_of("llmstack-a", table)) == {"one>=1", "two>=2"}


def test_an_environment_gets_its_pip_from_this_python_where_that_can(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / "environment" / "bin" / "python")
    monkeypatch.setattr(set_up, "version", lambda name: "23.0.1")
    set_up.make_environment()
    has_pip = subprocess.run([set_up.PYTHON, "-m", "pip", "--version"], capture_output=True, check=False)
    assert b"No module named pip" in has_pip.stderr
    set_up.make_environment()  # it is there already
    assert set_up.pip_itself()._command[:5] == [sys.executable, "-m", "pip", "--python", str(set_up.PYTHON)]


@pytest.mark.parametrize("found", ["22.3.1", None])
def test_an_environment_is_made_with_pip_where_this_python_has_none_or_an_old_one(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise set_up.PackageNotFoundError(name)
        return found

    made: list[bool] = []
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(set_up, "version", version)
    monkeypatch.setattr(set_up.venv, "create", lambda folder, with_pip: made.append(with_pip))
    set_up.make_environment()
    assert made == [True]
    assert set_up.pip_itself()._command[:3] == [str(tmp_path / "python"), "-m", "pip"]


def test_a_step_shows_its_lines_and_a_failure_has_the_end_of_its_output(set_up: ModuleType) -> None:
    shown: list[str] = []
    code = "print('said: 1 of 2'); print('other'); raise SystemExit('no space')"
    with pytest.raises(set_up.SetUpError, match=r"(?s)other.no space|no space.*other"):
        set_up.Step("testing", sys.executable, "-c", code, prefix="said:").run(shown.append)
    assert shown == ["1 of 2"]


def test_a_step_that_may_fail_says_why_and_goes_on(set_up: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    set_up.Step("testing", sys.executable, "-c", "raise SystemExit('no network')", may_fail=True).run(lambda line: None)
    assert "no network" in capsys.readouterr().out


def test_progress_names_every_task_that_runs(set_up: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = set_up.Progress()
    progress.now("kernels", "compiling")
    progress.now("packages", "installing")
    progress.now("kernels", None)
    progress.end()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["compiling", "compiling; installing", "installing"]


def test_the_error_of_a_task_reaches_who_waits_for_it(set_up: ModuleType) -> None:
    progress = set_up.Progress()
    failing = set_up.Step("testing", sys.executable, "-c", "raise SystemExit('broken')")
    task = set_up.Task("packages", progress, [failing])
    with pytest.raises(set_up.SetUpError, match="broken"):
        task.finish()
    progress.end()


def test_another_word_is_answered_with_the_two_that_there_are() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "set_up.py", "sevre"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "set_up.py serve" in result.stdout


@pytest.mark.parametrize("target", [".venv/.serving", ".venv/.synced"])
def test_make_sets_up_again_where_a_source_of_the_kernels_or_a_project_changed(target: str) -> None:
    assert f"{target}: $(PROJECTS) $(KERNELS) ;" in MAKEFILE
