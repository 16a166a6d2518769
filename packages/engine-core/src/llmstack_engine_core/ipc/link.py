"""Addresses of an engine core for its clients, and identities of connections."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_NUM_PARTS = 4  # of an identity


@dataclass(frozen=True, slots=True)
class Link:
    """The way of a client to an engine core, besides its address.

    Attributes:
        key_file: Keys for a TCP address.
        server_key: The engine core's public key; None is the one of the key file.
        heartbeat_timeout_s: A connection over TCP without a sign of life for so long is closed; 0 asks for none.
        client_name: A random name of the client; empty makes one for this connection.
        epoch: The number of this connection among those of the name: an engine core ends the earlier ones.
    """

    key_file: str | None = None
    server_key: bytes | None = None
    heartbeat_timeout_s: float = 0.0
    client_name: str = ""
    epoch: int = 0

    @property
    def is_remote(self) -> bool:
        """Whether the engine core may run on another machine."""
        return self.heartbeat_timeout_s > 0

    def identity(self, client_index: int) -> bytes:
        """The unique address of this connection in every frame to and from it."""
        return f"client-{client_index:04}-{self.client_name or secrets.token_hex(8)}-{self.epoch:08x}".encode()


def client_of(identity: bytes) -> tuple[bytes, bytes]:
    """The client of a connection, and its epoch, which compares as bytes."""
    if identity.count(b"-") != _NUM_PARTS - 1:
        return identity, b""
    name, _, epoch = identity.rpartition(b"-")
    return name, epoch
