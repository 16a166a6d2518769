"""Address of a server: the checked parts of `--url`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from llmstack_command.errors import ApiError

DEFAULT_PATH = "/v1"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one server.

    Attributes:
        path: Prefix of `/chat/completions`, without a trailing slash.
    """

    is_https: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads `http://host:port/v1`; a URL without a path means `/v1`.

        Raises:
            ApiError: It is not such a URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ApiError(f"--url: '{url[:80]}' is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ApiError(f"--url: '{url[:80]}' is not a URL such as http://localhost:8000/v1")
        is_https = parts.scheme == "https"
        return cls(is_https, parts.hostname, port or (443 if is_https else 80), parts.path.rstrip("/") or DEFAULT_PATH)

    def __str__(self) -> str:
        """The URL in the form that users type."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_https else 'http'}://{host}:{self.port}{self.path}"
