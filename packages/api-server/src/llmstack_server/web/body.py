"""Request bodies, read within limits of type, size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmstack_server.state.turns import Turns
from llmstack_server.web.errors import HTTPError, request_timeout, request_too_large, unsupported_media_type
from llmstack_server.web.json_body import decode_object, decoding
from llmstack_server.web.json_pieces import PIECE_BYTES
from llmstack_server.web.json_structure import JSONLimits
from llmstack_server.web.routes import spec_of
from llmstack_types.json_values import JSONObject

if TYPE_CHECKING:
    from starlette.requests import Request

    from llmstack_server.state.server_state import ServerState

Receive = Callable[[], Awaitable[Any]]

# A client that is still sending reads its refusal only if the server reads on: an immediate close resets the connection
# and discards the answer. Clients that send large bodies read nothing before their end.
LINGER_BYTES = 64 << 20
LINGER_S = 10.0
_LINGER_SILENT_S = 1.0

_JSON = "application/json"
_UNTYPED = frozenset({"", "application/x-www-form-urlencoded"})


class ClientDisconnected(Exception):
    """The client has disconnected, so no answer can be sent."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on the size of a body and on the time to receive it."""

    max_bytes: int = 4 << 20
    timeout_s: float = 60.0


async def read_object(state: ServerState, request: Request) -> JSONObject:
    """The JSON object of a request, within the limits of the server; raises as `read_json_object`."""
    http = state.config.http
    limits = BodyLimits(http.max_body_bytes, http.receive_timeout_s)
    takes_untyped = spec_of(request.scope["route"]).takes_untyped
    return await read_json_object(request.headers, request.receive, limits, state.decoding, takes_untyped=takes_untyped)


async def read_json_object(
    headers: Mapping[str, str], receive: Receive, limits: BodyLimits, turns: Turns, *, takes_untyped: bool = False
) -> JSONObject:
    """The JSON object of a request. A large one is decoded in pieces, so that other requests wait for one piece only.

    `takes_untyped`: Whether a body without a content type counts as JSON.

    Raises:
        HTTPError: Wrong content type, too large, too slow, too costly to decode, or not a JSON object.
        ClientDisconnected: The client has disconnected.
    """
    check_media_type(headers, takes_untyped=takes_untyped)
    body = await read_body(headers, receive, limits)
    if len(body) <= PIECE_BYTES:  # here, since nearly every request is one of these
        return decode_object(body, JSONLimits.of_body(limits.max_bytes))
    return await decode_body(body, limits.max_bytes, turns)


async def decode_body(body: bytes | bytearray, max_bytes: int, turns: Turns) -> JSONObject:
    """The JSON object of a body that may have `max_bytes`; raises HTTPError as `read_json_object`."""
    json_limits = JSONLimits.of_body(max_bytes)
    if len(body) <= PIECE_BYTES:
        return decode_object(body, json_limits)
    async with turns.turn(len(body)):
        document = decoding(body, json_limits)
        await asyncio.sleep(0)
        for _ in document.run():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return document.value


def check_media_type(headers: Mapping[str, str], *, takes_untyped: bool = False) -> None:
    """Raises HTTPError 415 unless the body is JSON, not compressed, in UTF-8.

    `takes_untyped`: Whether it is JSON where no type is named, or that of `curl -d`. A browser may send either for a
    foreign page, but names that page, and `OriginGuard` refuses it.
    """
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    if takes_untyped and media_type in _UNTYPED:
        media_type = _JSON
    if media_type != _JSON and not (media_type.startswith("application/") and media_type.endswith("+json")):
        raise HTTPError(unsupported_media_type("Only 'application/json' is allowed"))
    charset = parameters.strip().lower().replace('"', "").removeprefix("charset=")
    if parameters.strip().lower().startswith("charset=") and charset not in ("utf-8", "utf8"):
        raise HTTPError(unsupported_media_type("Only the charset utf-8 is allowed"))
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPError(unsupported_media_type("No content encoding is supported"))


async def read_body(headers: Mapping[str, str], receive: Receive, limits: BodyLimits) -> bytearray:
    """The body's bytes; raises as `read_json_object` does. A body whose length header is over the limit is not read."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.max_bytes):
        raise HTTPError(request_too_large(limits.max_bytes))
    body, has_more = bytearray(), True
    take_body: Callable[[], bytes] | None = getattr(receive, "take_body", None)
    if take_body is not None:  # it was read before, within the limits
        return bytearray(take_body())
    try:
        async with asyncio.timeout(limits.timeout_s):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > limits.max_bytes:
                    raise HTTPError(request_too_large(limits.max_bytes))
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise HTTPError(request_timeout()) from None
    return body


async def discard_body(receive: Receive) -> None:
    """Reads and drops what the client still sends: 64 MiB in 10 s, until it sends nothing for a second."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                async with asyncio.timeout(_LINGER_SILENT_S):
                    message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
