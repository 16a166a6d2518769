"""The socket a server listens on, had before anything is loaded: a port, or a path of the file system."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from llmstack_server.config import HTTPConfig
from llmstack_server.launcher import bind_socket, url_of
from llmstack_server.unix_socket import unix_socket


@contextmanager
def listening(http: HTTPConfig) -> Iterator[socket.socket]:
    """A listening socket, closed at the end, and its file removed where it has one.

    Raises:
        ServeError: The address cannot be had, or the files of encryption cannot be used.
    """
    if http.tls is not None:
        from llmstack_server.tls import make_tls_context

        make_tls_context(http.tls)  # made again when it is needed; here its files are checked
    if http.uds is not None:
        with unix_socket(http.uds, http.uds_mode) as listener:
            yield listener
    else:
        with bind_socket(http.host, http.port) as listener:
            yield listener


def address_of(http: HTTPConfig, listener: socket.socket) -> str:
    """Where clients find the server, as a user types it."""
    if http.uds is not None:
        return f"unix:{http.uds}"
    url = url_of(listener)
    return url if http.tls is None else url.replace("http://", "https://", 1)
