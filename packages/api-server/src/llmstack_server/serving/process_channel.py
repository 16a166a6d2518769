"""Messages between an API process and its supervisor: JSON over a socket pair."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

from llmstack_types.json_values import JSONObject

MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")

Message = JSONObject


class ChannelError(Exception):
    """Received bytes are not a message, or a message is too large."""


def send(channel: socket.socket, message: Message) -> None:
    """Sends one message, and blocks until it is written.

    Raises:
        OSError: The other side has closed the channel.
    """
    channel.sendall(packed(message))


def receive(channel: socket.socket) -> Message | None:
    """Waits for one message; None when the other side has closed the channel.

    Raises:
        ChannelError: The received bytes are not a message.
    """
    head = _receive_exactly(channel, _LENGTH.size)
    body = None if head is None else _receive_exactly(channel, _checked_length(head))
    return None if body is None else _unpacked(body)


async def receive_from(reader: asyncio.StreamReader) -> Message | None:
    """Does the same as `receive` on an event loop."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return _unpacked(await reader.readexactly(_checked_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def packed(message: Message) -> bytes:
    """The bytes of one message.

    Raises:
        ChannelError: It is too large, or contains a value that JSON cannot represent.
    """
    try:
        body = json.dumps(message).encode()
    except (TypeError, ValueError) as error:
        raise ChannelError(f"a message cannot be encoded: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


def _checked_length(head: bytes) -> int:
    (num_bytes,) = _LENGTH.unpack(head)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message of {num_bytes} bytes is too large")
    return int(num_bytes)


def _unpacked(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ChannelError("the received bytes are not JSON") from error
    if not isinstance(message, dict):
        raise ChannelError("a message must be an object")
    return message


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        try:
            chunk = channel.recv(num_bytes - len(received))
        except ConnectionError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)
