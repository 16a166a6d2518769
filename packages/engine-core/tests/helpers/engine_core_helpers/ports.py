"""Ports of this machine that are chosen before a process listens on them."""

from __future__ import annotations

import itertools
import os
import socket

# The system gives higher ones to processes that ask for any port, also between the choice and its use.
_PORTS = range(20_000, 32_000)
_NUMBERS = itertools.count(os.getpid() * 61)  # processes that test beside each other begin far apart


def free_port() -> int:
    """A port of the loopback interface; no call in this process returns it again for a long time."""
    for number in itertools.islice(_NUMBERS, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("all ports are in use")


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
