"""Items as a request has them, and digests of their decoded forms."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmstack_media.processors.processor import ItemProcessor
from llmstack_types.vocabulary import MediaKind


class Part(Protocol):
    """A picture, video or sound as a request names it; a server has a class of its own."""

    @property
    def kind(self) -> MediaKind:
        """The kind of the part: `image`, `video` or `audio`."""
        ...

    @property
    def url(self) -> str:
        """`data:`, `http(s):` or `file:`; empty where `uuid` names one that was sent before."""
        ...

    @property
    def uuid(self) -> str:
        """The client's own name for it; empty for none. With content, the content decides."""
        ...

    @property
    def detail(self) -> str:
        """Auto, low or high."""
        ...

    @property
    def path(self) -> str:
        """A file that the caller may read, in place of a URL; empty for none."""
        ...

    @property
    def param(self) -> str:
        """The field of the request, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A `Part` with defaults. Its representation has no content, so that no log gets any."""

    url: str = field(default="", repr=False)
    uuid: str = ""
    detail: str = "auto"
    param: str = ""
    kind: MediaKind = "image"
    path: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class AskedPart:
    """A part as a request asks for it: with options, processor, and all that its array depends on by name."""

    part: Part = field(repr=False)
    options: Mapping[str, object]
    processor: ItemProcessor[Any]
    names: tuple[tuple[str, str], ...]

    @property
    def alias(self) -> str:
        """A name of fixed length for the client's own name and the options in effect."""
        return digest_of((("uuid", self.part.uuid), *self.names), b"").hex()


@dataclass(frozen=True, slots=True)
class MediaStats:
    """Counts since the start.

    Attributes:
        num_queries: Pictures that were asked of the store.
        num_hits: Those that it had.
        num_bytes: Of pictures as they came.
        decode_s: Processor time of children.
        fetch_results: Fetches by `ok` or the code of their refusal, `data:` included.
        failures: Pictures that could not be read, by code.
    """

    num_queries: int
    num_hits: int
    num_bytes: int
    decode_s: float
    fetch_results: Mapping[str, int]
    failures: Mapping[str, int]


def digest_of(names: Iterable[tuple[str, str]], data: bytes) -> bytes:
    """SHA-256 of what a picture becomes: every name and value, and the bytes as they came, each with its length."""
    return _hashed([*(text.encode() for pair in names for text in pair), data])


def _hashed(parts: list[bytes]) -> bytes:
    digest = hashlib.sha256(b"llmstack-media")
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
