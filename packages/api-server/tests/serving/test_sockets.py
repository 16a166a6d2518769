"""Unix sockets: for their owner alone, never in place of one in use, gone at the end."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_server.options.errors import ServeError
from llmstack_server.serving.sockets import unix_socket


@pytest.fixture
def path() -> Iterator[str]:
    """In a folder with a short name, since the paths of sockets are limited."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "s")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_its_file_has_the_mode_asked_for_and_goes_at_the_end(path: str, mode: int):
    with unix_socket(path, mode) as listener:
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        assert listener.getsockname() == path
    assert not os.path.exists(path)


def test_the_umask_is_as_before(path: str):
    before = os.umask(0o022)
    try:
        with unix_socket(path):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_one_that_a_killed_server_left_is_replaced(path: str):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with unix_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_one_in_use_is_left_alone(path: str):
    with unix_socket(path):
        with pytest.raises(ServeError, match=f"--uds {path} is in use"), unix_socket(path):
            pass
        assert os.path.exists(path)


def test_a_file_that_is_no_socket_is_left_alone(path: str):
    Path(path).write_text("precious")
    with pytest.raises(ServeError, match="no socket"), unix_socket(path):
        pass
    assert Path(path).read_text() == "precious"


def test_the_file_of_a_successor_stays(path: str):
    with unix_socket(path):
        os.unlink(path)
        successor = socket.socket(socket.AF_UNIX)
        successor.bind(path)
    successor.close()
    assert os.path.exists(path)


@pytest.mark.parametrize("path", ["", "/nowhere/at/all/s", "/tmp/" + "a" * 200])
def test_paths_that_cannot_be_had_are_named(path: str):
    with pytest.raises(ServeError, match="--uds"), unix_socket(path):
        pass
