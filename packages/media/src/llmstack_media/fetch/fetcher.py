"""Fetches media: a name is resolved once, and the checked address is dialled."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import urljoin

from llmstack_media.errors import fetch_failed, url_not_allowed
from llmstack_media.fetch.addresses import may_dial
from llmstack_media.fetch.data_urls import decode_data_url, decoded_length
from llmstack_media.fetch.http_get import Reserve, Response, read_body, read_head, send_get
from llmstack_media.fetch.local_files import names_below, read_file, read_local
from llmstack_media.fetch.policy import FetchPolicy, Target, http_target, split
from llmstack_types import InvalidRequestError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolver = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a host and port."""
Connector = Callable[[str, int, str | None], Awaitable[Streams]]
"""A connection to an address and port; with the host's name over TLS."""
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_DIALLED = 3
_IN_THREAD_BYTES = 1 << 18
"""Base64 that is longer is decoded off the event loop."""


class Fetcher:
    """The bytes behind a URL, under a policy. It has no proxy, no cookies and no credentials."""

    def __init__(
        self, policy: FetchPolicy, *, resolve: Resolver | None = None, connect: Connector | None = None
    ) -> None:
        self._policy = policy
        self._resolve = resolve or resolve_host
        self._connect = connect or connect_to

    def check(self, url: str) -> None:
        """Refuses a URL by its text alone, before anything is opened, resolved or read; raises as `fetch`."""
        scheme = _scheme(url)
        if scheme == "file":
            names_below(url, self._policy.local_path)
        elif scheme != "data":
            http_target(url, self._policy)

    async def fetch(self, url: str, reserve: Reserve = lambda num_bytes: None) -> bytes:
        """The bytes. `reserve` is called before some are read, in any thread.

        Raises:
            InvalidRequestError: The URL is not allowed, or gives nothing usable. The message repeats neither the URL
                nor content. Also what `reserve` raises.
        """
        scheme = _scheme(url)
        if scheme == "data":
            reserve(decoded_length(url))
            return await _off_the_loop(len(url), decode_data_url, url, self._policy.max_bytes)
        if scheme == "file":
            policy = self._policy
            return await asyncio.to_thread(read_local, url, policy.local_path, policy.max_bytes, reserve)
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._over_http(url, reserve)
        except InvalidRequestError:
            raise
        except TimeoutError as error:
            raise fetch_failed(f"The URL could not be fetched within {self._policy.timeout_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:  # ValueError: a line or a name beyond what streams take
            raise fetch_failed("The connection to the server of this URL failed") from error

    async def read(self, path: str, reserve: Reserve) -> bytes:
        """The bytes of a file that the caller may read, whatever the policy says of `file:` URLs; raises as `fetch`."""
        return await asyncio.to_thread(read_file, path, self._policy.max_bytes, reserve)

    async def _over_http(self, url: str, reserve: Reserve) -> bytes:
        target = http_target(url, self._policy)
        for num_redirects in range(self._policy.max_redirects + 1):
            found = await self._get(target, reserve)
            if isinstance(found, bytes):
                return found
            if not self._policy.has_redirects or num_redirects == self._policy.max_redirects:
                raise fetch_failed("The URL leads to more redirects than are followed")
            location = found.headers.get("location", "")
            split(location)  # `urljoin` would remove what must not be in it
            url = urljoin(url, location)
            following = http_target(url, self._policy)
            if (following.scheme, following.port) != (target.scheme, target.port):
                raise url_not_allowed("is redirected to another scheme or port")
            target = following
        raise fetch_failed("The URL leads to more redirects than are followed")

    async def _get(self, target: Target, reserve: Reserve) -> bytes | Response:
        """The body of a URL, or the answer that redirects it."""
        reader, writer = await self._connected(await self._checked_addresses(target), target)
        try:
            await send_get(writer, target)
            response = await read_head(reader)
            if response.status in _REDIRECTS:
                return response
            if response.status != 200:
                raise fetch_failed(f"The server of this URL answered with {response.described}")
            return await read_body(reader, response, self._policy.max_bytes, reserve)
        finally:
            writer.transport.abort()

    async def _checked_addresses(self, target: Target) -> list[str]:
        addresses = await self._resolve(target.host, target.port)
        if not addresses:
            raise fetch_failed("The host of this URL has no address")
        # One address in a hundred that is not public is enough to refuse: otherwise an attacker only has to try again.
        if not all(may_dial(address, self._policy.networks) for address in addresses):
            raise url_not_allowed("has a host with an address that is not public")
        return addresses[:_MAX_DIALLED]

    async def _connected(self, addresses: list[str], target: Target) -> Streams:
        """A connection to the first address that takes one: some may be out of reach."""
        server_name = target.host if target.scheme == "https" else None
        for address in addresses[:-1]:
            try:
                async with asyncio.timeout(self._policy.timeout_s / len(addresses)):
                    return await self._connect(address, target.port, server_name)
            except OSError:  # a timeout too
                continue
        return await self._connect(addresses[-1], target.port, server_name)


async def resolve_host(host: str, port: int) -> list[str]:
    """All addresses of a host, as the system knows them.

    Raises:
        InvalidRequestError: It has none.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise fetch_failed("The host of this URL cannot be resolved") from error
    return [str(entry[4][0]) for entry in found]


async def connect_to(address: str, port: int, server_name: str | None) -> Streams:
    """A connection to an address; over TLS, the certificate has to be of `server_name`."""
    if server_name is None:
        return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(address, port, ssl=_tls(), server_hostname=server_name)


def is_inline(url: str) -> bool:
    """Whether a URL has its content in itself."""
    return _scheme(url) == "data"


def _scheme(url: str) -> str:
    return url[:6].partition(":")[0].lower()


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _off_the_loop(length: int, work: Callable[[str, int], bytes], url: str, max_bytes: int) -> bytes:
    if length > _IN_THREAD_BYTES:
        return await asyncio.to_thread(work, url, max_bytes)
    return work(url, max_bytes)
