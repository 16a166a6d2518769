"""Pages whose requests a browser may send, and names of a server for them."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import Scope

from llmstack_server.options.config import HTTPConfig, is_loopback
from llmstack_server.web.errors import HTTPError, cross_site_request, unknown_host
from llmstack_server.web.websocket import WEBSOCKET

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = (b"same-origin", b"none")
_ANY = "*"


class OriginGuard:
    """Refuses what browsers send for a foreign page: to a route that changes state, or under a foreign name.

    Only without API keys: browsers send a key for a foreign page after a preflight alone, which CORS decides. The page
    that opens a WebSocket is looked at in any case.
    """

    def __init__(self, http: HTTPConfig) -> None:
        """A foreign name can lead only pages of a browser on this machine, so it matters on loopback addresses."""
        self._origins = frozenset(origin.lower().rstrip("/") for origin in http.cors.origins)
        self._hosts = frozenset(host.lower() for host in (*http.cors.hosts, http.host))
        self._is_open = not http.api_keys
        is_private = not http.api_keys and http.uds is None and is_loopback(http.host)
        self._checks_hosts = is_private and _ANY not in self._hosts
        self._known_host = b""  # the last one that was accepted

    def check(self, scope: Scope) -> None:
        """Returns if the request comes from a page of this server, an allowed one, or no page.

        Raises:
            HTTPError: 400 `invalid_host` or 403 `cross_site_request`.
        """
        site, origin, host = None, None, b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if self._checks_hosts and host not in (b"", self._known_host):  # none with HTTP/1.0, which no browser speaks
            self._check_host(host)
        if (site is None and origin is None) or site in _OWN_SITES:
            return
        is_socket = WEBSOCKET in scope.get("state", ())  # no preflight comes before it, with a key or without
        if not is_socket and (not self._is_open or scope["method"] in _SAFE_METHODS):
            return
        if not self._is_allowed(site, origin or b"", host):
            raise HTTPError(cross_site_request())

    def _is_allowed(self, site: bytes | None, origin: bytes, host: bytes) -> bool:
        text = origin.decode("latin-1").lower()
        if _ANY in self._origins or text in self._origins:
            return True
        # Browsers tell the site only to servers with HTTPS and those of their own machine.
        return site is None and text.partition("://")[2] == host.decode("latin-1").lower()

    def _check_host(self, host: bytes) -> None:
        name = _host_name(host.decode("latin-1"))
        if name is None or not (name in self._hosts or name.endswith(".localhost") or is_loopback(name)):
            raise HTTPError(unknown_host())
        self._known_host = host


def _host_name(host: str) -> str | None:
    """The name in a `Host` header without its port, in lower case; None where it is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
