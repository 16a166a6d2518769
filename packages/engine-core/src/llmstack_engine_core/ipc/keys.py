"""Key files of engine cores on TCP: one pair of CURVE keys for both ends."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

import zmq

from llmstack_types import EngineStartError

KEY_LENGTH: Final = 40  # of 32 bytes in Z85
_MAX_FILE_BYTES: Final = 1024


def keys_for(address: str, key_file: str | None) -> tuple[bytes, bytes] | None:
    """The public and the secret key for a TCP address; None for a unix socket, which its directory protects.

    Raises:
        EngineStartError: The address needs a key file and there is none, or other users may read it.
    """
    if not address.startswith("tcp://"):
        return None
    if key_file is None:
        raise EngineStartError(f"{address}: every user of the machine can connect to it, so it needs --engine-key-file")
    return read_keys(Path(key_file))


def make_key_file(path: Path) -> None:
    """Writes a new pair of keys, for this user only; leaves a file that exists.

    Raises:
        EngineStartError: It cannot be written.
    """
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"\n".join([*zmq.curve_keypair(), b""]))
    except OSError as error:
        raise EngineStartError(f"the key file {path} cannot be written: {error.strerror}") from error


def read_keys(path: Path) -> tuple[bytes, bytes]:
    """The public and the secret key of a file; its content is in no message.

    Raises:
        EngineStartError: It cannot be read, other users can, or it holds no keys.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            lines = file.read(_MAX_FILE_BYTES).split()
    except OSError as error:
        raise EngineStartError(f"the key file {path} cannot be read: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise EngineStartError(f"the key file {path} is open to other users; its mode must be 0600")
    if len(lines) != 2 or any(len(line) != KEY_LENGTH for line in lines):
        raise EngineStartError(f"the key file {path} must hold two keys of {KEY_LENGTH} characters")
    try:
        is_pair = zmq.curve_public(lines[1]) == lines[0]
    except (zmq.ZMQError, ValueError):
        is_pair = False
    if not is_pair:
        raise EngineStartError(f"the keys of {path} do not belong to each other")
    return lines[0], lines[1]
