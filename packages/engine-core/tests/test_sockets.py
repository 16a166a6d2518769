"""Sockets live in a directory that no other user can enter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmstack_engine_core.ipc.sockets import DIRECTORY_PREFIX, check_private_directory, make_private_directory
from llmstack_types import EngineStartError


def test_a_directory_is_made_in_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = make_private_directory()
    assert directory.parent == tmp_path
    assert directory.name.startswith(DIRECTORY_PREFIX)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_without_a_runtime_directory_the_temporary_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for runtime in ("", str(tmp_path / "absent")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert make_private_directory().parent == tmp_path


def test_a_path_too_long_for_a_socket_is_refused_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / ("x" * 120)
    parent.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    with pytest.raises(EngineStartError, match="too long"):
        make_private_directory()
    assert not list(parent.iterdir())


def test_no_place_for_a_directory_is_a_start_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineStartError, match="TMPDIR"):
        make_private_directory()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    os.chmod(directory, 0o755)
    with pytest.raises(EngineStartError, match="open to other users"):
        check_private_directory(directory)


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "absent"):
        with pytest.raises(EngineStartError):
            check_private_directory(tmp_path / name)
