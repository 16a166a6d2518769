"""Key files of engine cores on TCP: CURVE keys that both ends share."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from llmstack_types import EngineStartError

KEY_LENGTH: Final = 40  # of 32 bytes in Z85
_MAX_FILE_BYTES: Final = 1024
_MAX_PAIRS: Final = 2


@dataclass(frozen=True, slots=True)
class Keys:
    """The content of a key file, of which no message shows the secrets.

    Attributes:
        pairs: Pairs of a public and a secret key: the one in use and, while keys are replaced, the other one.
    """

    pairs: tuple[tuple[bytes, bytes], ...] = field(repr=False)

    @property
    def public(self) -> bytes:
        """The public key in use."""
        return self.pairs[0][0]

    @property
    def secret(self) -> bytes:
        """The secret key in use."""
        return self.pairs[0][1]

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The public keys that the other end may have."""
        return tuple(public for public, _ in self.pairs)


def keys_for(address: str, key_file: str | None) -> Keys | None:
    """The keys for a TCP address; None for a unix socket, which its directory protects.

    Raises:
        EngineStartError: The address needs a key file and there is none, or other users may read it.
    """
    if not address.startswith("tcp://"):
        return None
    if key_file is None:
        raise EngineStartError(f"{address}: every user of the machine can connect to it, so it needs --engine-key-file")
    return read_keys(Path(key_file))


def make_key_file(path: Path) -> bool:
    """Writes a new pair of keys, for this user only; leaves a file that exists and returns False.

    Raises:
        EngineStartError: It cannot be written.
    """
    try:
        _write_new(path, (zmq.curve_keypair(),))
    except FileExistsError:
        return False
    except OSError as error:
        raise EngineStartError(f"the key file {path} cannot be written: {error.strerror}") from error
    return True


def replace_keys(path: Path, pairs: tuple[tuple[bytes, bytes], ...]) -> None:
    """Writes these pairs in place of those of an existing file, all or none.

    Raises:
        EngineStartError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_new(temporary, pairs)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise EngineStartError(f"the key file {path} cannot be written: {error.strerror}") from error


def _write_new(path: Path, pairs: tuple[tuple[bytes, bytes], ...]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"".join(key + b"\n" for pair in pairs for key in pair))


def read_keys(path: Path) -> Keys:
    """The keys of a file; its content is in no message.

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
    is_whole = len(lines) in range(2, 2 * _MAX_PAIRS + 1, 2)
    if not is_whole or any(len(line) != KEY_LENGTH for line in lines):
        raise EngineStartError(f"the key file {path} must hold two keys of {KEY_LENGTH} characters, or four")
    pairs = tuple(zip(lines[::2], lines[1::2], strict=True))
    if not all(map(_is_pair, pairs)):
        raise EngineStartError(f"the keys of {path} do not belong to each other")
    return Keys(pairs)


def _is_pair(pair: tuple[bytes, bytes]) -> bool:
    try:
        return bool(zmq.curve_public(pair[1]) == pair[0])
    except (zmq.ZMQError, ValueError):
        return False
