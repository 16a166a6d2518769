"""Policy of fetched URLs: a decision by their text, before anything is resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from llmstack_media.errors import url_not_allowed
from llmstack_media.fetch.addresses import Network

MAX_URL_LENGTH = 8192
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """The URLs that may be fetched; by default `data:` alone.

    Attributes:
        domains: Hosts that are allowed: by name, all below `*.name`, or every public host by `*`.
        networks: Further networks that may be dialled, for hosts that are not public.
        local_path: The folder of which files may be read.
        has_redirects: Whether redirects are followed, at most `max_redirects`.
        timeout_s: For a whole fetch, redirects included.
        max_bytes: Of what is fetched.
    """

    domains: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    local_path: Path | None = None
    has_redirects: bool = True
    max_redirects: int = 3
    timeout_s: float = 10.0
    max_bytes: int = 25 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """An allowed URL in its parts.

    Attributes:
        host: Its name in ASCII, lower case, without a dot at its end; or an address.
        path: With the query, as it is requested.
    """

    scheme: str
    host: str = field(repr=False)
    port: int
    path: str = field(repr=False)

    @property
    def host_header(self) -> str:
        """The host as the request names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def http_target(url: str, policy: FetchPolicy) -> Target:
    """The parts of an allowed URL.

    Raises:
        InvalidRequestError: It is not allowed, or no URL.
    """
    if not policy.domains:
        raise url_not_allowed(
            "is not fetched: this server fetches no http or https URLs. Send the content in a data: URL"
        )
    parts = split(url)
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise url_not_allowed("must begin with http:// or https://")
    if "@" in parts.netloc:
        raise url_not_allowed("must not contain a user name or password")
    try:
        port = parts.port or _PORTS[scheme]
    except ValueError as error:
        raise url_not_allowed("has an invalid port") from error
    host = _ascii_host(parts.hostname or "")
    if not is_allowed_host(host, policy.domains):
        raise url_not_allowed("has a host that is not in the list of allowed domains")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(scheme, host, port, path)


def split(url: str) -> SplitResult:
    """The parts of a URL of printable ASCII.

    Raises:
        InvalidRequestError: It is something else, too long, or has a backslash.
    """
    # Parsers disagree on white space, control characters and backslashes, which has sent requests elsewhere.
    if len(url) > MAX_URL_LENGTH or not all("!" <= character <= "~" for character in url) or "\\" in url:
        raise url_not_allowed(f"must be printable ASCII without spaces, at most {MAX_URL_LENGTH} characters")
    try:
        return urlsplit(url)
    except ValueError as error:
        raise url_not_allowed("is not a valid URL") from error


def is_allowed_host(host: str, domains: tuple[str, ...]) -> bool:
    """Whether a host is named by a list of domains."""
    for domain in domains:
        name = domain.lower().rstrip(".")
        if name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])):
            return True
    return False


def _ascii_host(host: str) -> str:
    host = host.lower().rstrip(".")
    if not host or "%" in host or len(host) > 253:
        raise url_not_allowed("has no valid host")
    return host
