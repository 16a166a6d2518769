"""Key files: for one user, made once, and refused in one line when something is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_engine_core.ipc.keys import keys_for, make_key_file, read_keys
from llmstack_types import EngineStartError


def test_a_key_file_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_key_file(path)
    keys = read_keys(path)
    make_key_file(path)
    assert read_keys(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys_for("tcp://127.0.0.1:5600", str(path)) == keys
    assert keys_for("ipc:///run/engine.sock", None) is None


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"", 0o600, "two keys"),
        (b"a" * 40 + b"\n", 0o600, "or four"),
        (b"a" * 40 + b"\n" + b"b" * 40, 0o600, "belong to each other"),
        (b"~" * 40 + b"\n" + b"~" * 40, 0o600, "belong to each other"),
        (b"a" * 40 + b"\n" + b"b" * 40, 0o640, "open to other users"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_faulty_key_file_is_refused(tmp_path: Path, content: bytes | None, mode: int, message: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(EngineStartError, match=message) as caught:
        read_keys(path)
    assert "aaaa" not in str(caught.value)


def test_a_key_file_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="cannot be written"):
        make_key_file(tmp_path / "absent" / "keys")
