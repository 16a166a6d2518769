"""Addresses for engine cores: those that no other user can reach without a key."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmstack_engine_core.ipc.addresses import check_address, prepare_address
from llmstack_types import EngineStartError


@pytest.mark.parametrize("address", ["ipc:///run/engine.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_unix_sockets_and_the_loopback_interface_are_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("tcp://0.0.0.0:5555", "listens on 127"),
        ("tcp://192.168.1.7:5555", "listens on 127"),
        ("tcp://localhost:5555", "listens on 127"),  # a name can be pointed elsewhere
        ("tcp://127.0.0.1:0", "port"),
        ("tcp://127.0.0.1:70000", "port"),
        ("tcp://127.0.0.1", "expected"),
        ("http://127.0.0.1:80", "expected"),
        ("inproc://engine", "expected"),
        ("ipc://relative.sock", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc:///" + "x" * 200, "at most"),
    ],
)
def test_other_addresses_are_refused_by_name(address: str, part: str) -> None:
    with pytest.raises(EngineStartError, match=part) as caught:
        check_address(address)
    assert address[:20] in str(caught.value)


def test_the_directory_of_a_path_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "engine.sock"
    prepare_address(f"ipc://{path}")
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(EngineStartError, match="open to other users"):
        prepare_address(f"ipc://{tmp_path}/engine.sock")


def test_an_address_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(EngineStartError, match="in use"):
            prepare_address(f"ipc://{path}")
    prepare_address(f"ipc://{path}")  # its file is left, but no process listens
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineStartError, match="in use"):
            prepare_address(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
