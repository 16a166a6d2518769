"""`--state-dir` keeps one secret, for one server of one user."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmstack_server.options.config import HTTPConfig, ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.state_directory import LOCK_FILE, SECRET_FILE, check_state_folder, deployment_secret


def secret_in(path: Path | None) -> bytes:
    with deployment_secret(None if path is None else str(path)) as secret:
        return secret


def test_without_a_folder_every_start_has_a_new_secret():
    assert len({secret_in(None), secret_in(None)}) == 2
    assert len(secret_in(None)) == 32


def test_the_secret_stays_in_a_folder_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "state"
    secret = secret_in(path)
    assert secret_in(path) == secret
    assert path.stat().st_mode & 0o777 == 0o700
    assert {(path / name).stat().st_mode & 0o777 for name in (SECRET_FILE, LOCK_FILE)} == {0o600}
    assert secret_in(tmp_path / "another") != secret


def test_a_file_that_was_not_finished_is_replaced(tmp_path: Path):
    tmp_path.chmod(0o700)
    (tmp_path / f"{SECRET_FILE}.new").write_bytes(b"half")
    assert len(secret_in(tmp_path)) == 32


def test_a_second_server_is_refused_until_the_first_ends(tmp_path: Path):
    path = tmp_path / "state"
    with deployment_secret(str(path)) as secret, pytest.raises(ServeError, match="in use by another server"):
        secret_in(path)
    assert secret_in(path) == secret


def made(path: Path) -> None:
    secret_in(path)


def open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


def open_secret(path: Path) -> None:
    made(path)
    (path / SECRET_FILE).chmod(0o640)


def short_secret(path: Path) -> None:
    made(path)
    os.truncate(path / SECRET_FILE, 31)


def pipe(path: Path) -> None:
    path.mkdir(0o700)
    os.mkfifo(path / SECRET_FILE, 0o600)


def linked_secret(path: Path) -> None:
    made(path)
    (path / SECRET_FILE).rename(path / "elsewhere")
    (path / SECRET_FILE).symlink_to("elsewhere")


def link(path: Path) -> None:
    made(path.with_name("target"))
    path.symlink_to("target")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (open_folder, "open to other users: its permissions must be 700"),
        (open_secret, "open to other users: its permissions must be 600"),
        (short_secret, "not one of 32 bytes"),
        (pipe, "not one of 32 bytes"),
        (linked_secret, "cannot be used"),
        (link, "symbolic link"),
        (Path.touch, "Not a directory"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
    ],
)
def test_what_is_not_ours_alone_is_refused_in_one_sentence(
    tmp_path: Path, prepare: Callable[[Path], object], reason: str
):
    path = tmp_path / "state"
    prepare(path)
    with pytest.raises(ServeError, match=f"--state-dir {re.escape(str(path))}.*{reason}") as caught:
        secret_in(path)
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ServeError, match="belongs to another user"):
        secret_in(tmp_path / "state")


def test_a_configuration_has_a_secret_of_its_own_that_it_does_not_show():
    one, other = (ServeConfig("m", ("m",), http=HTTPConfig()) for _ in range(2))
    assert one.deployment_secret != other.deployment_secret
    assert "deployment_secret" not in repr(one)


def test_a_check_of_the_folder_writes_nothing(tmp_path: Path):
    path = tmp_path / "state"
    assert check_state_folder(str(path)) is False
    assert not path.exists()
    path.mkdir(mode=0o700)
    assert check_state_folder(str(path)) is True
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/state", "file", "link"])
def test_a_check_refuses_what_a_start_refuses_in_the_same_words(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    texts = []
    for check in (check_state_folder, lambda path: secret_in(Path(path))):
        with pytest.raises(ServeError) as raised:
            check(str(tmp_path / name))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_a_check_sees_a_server_that_runs(tmp_path: Path):
    path = tmp_path / "state"
    with deployment_secret(str(path)), pytest.raises(ServeError, match="in use by another server"):
        check_state_folder(str(path))
    assert check_state_folder(str(path)) is True
