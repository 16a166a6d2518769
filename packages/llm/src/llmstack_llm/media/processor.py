"""Protocol of the code that fetches, counts and decodes media for a front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from llmstack_llm.media.parts import MediaPart
from llmstack_types import MediaItem
from llmstack_types.lifecycle import AsyncClosing
from llmstack_types.vocabulary import MediaKind


class PreparedMedia(Protocol):
    """A decoded item, which an engine core can read until `release`."""

    def item(self, offset: int, num_tokens: int, embed_runs: tuple[tuple[int, int], ...] = ()) -> MediaItem:
        """The item at its place in the prompt."""
        ...

    def release(self) -> None:
        """Ends its use by one request. Idempotent."""
        ...


class OpenedMedia(Protocol):
    """An item that is fetched and counted, and not decoded."""

    @property
    def pieces(self) -> Sequence[tuple[str, int]]:
        """The text in the prompt: pieces, each with the number of vectors that replace it as one special token."""
        ...

    async def prepare(self) -> PreparedMedia:
        """Decodes it.

        Raises:
            InvalidRequestError: It is damaged.
            ServerOverloadedError: There is no memory or no time for it.
        """
        ...

    def close(self) -> None:
        """Forgets what was fetched, for a prompt that is refused. Idempotent; without it that ends with this object."""
        ...


class MediaSymbols(NamedTuple):
    """How one kind of media is written in prompts.

    Attributes:
        token: What a chat template prints where an item stands; it is replaced by the item's pieces.
        prompt: What is put into the text of a message where the template takes texts alone; it holds `token` once.
            `{number}` in it is the number of the item among those of its kind, from 1 on.
        vectors: The tokens of an item's pieces that vectors replace.
    """

    token: str
    prompt: str
    vectors: tuple[str, ...] = ()

    def put_into(self, text: str, mark: str) -> str:
        """The text with `prompt` in place of each mark."""
        first, *rest = text.split(mark)
        numbered = (f"{self.prompt.replace('{number}', str(number))}{part}" for number, part in enumerate(rest, 1))
        return "".join([first, *numbered])


@dataclass(slots=True)
class MediaRequest:
    """One request with several conversations: the bytes of their media are one sum.

    Attributes:
        sources: The sum, which a processor sets with the first.
    """

    sources: Any = None


class MediaStats(Protocol):
    """Counts since the start."""

    @property
    def num_queries(self) -> int:
        """Items that were asked of the store of decoded ones."""
        ...

    @property
    def num_hits(self) -> int:
        """The number of lookups that found their item."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of items as they came."""
        ...

    @property
    def decode_s(self) -> float:
        """Processor time of what decodes."""
        ...

    @property
    def fetch_results(self) -> Mapping[str, int]:
        """Fetches by `ok` or the code of their refusal, `data:` included."""
        ...

    @property
    def failures(self) -> Mapping[str, int]:
        """Items that could not be read, by code."""
        ...


class MediaProcessor(AsyncClosing, Protocol):
    """The media of one model's requests; used by one event loop."""

    @property
    def symbols(self) -> Mapping[MediaKind, MediaSymbols]:
        """The symbols of each kind that the model takes."""
        ...

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far."""
        ...

    @property
    def max_items(self) -> Mapping[MediaKind, int]:
        """Items of each kind in one prompt at most."""
        ...

    @property
    def max_bytes(self) -> int:
        """The largest size of an item as it comes, in bytes."""
        ...

    @property
    def max_pixels(self) -> int:
        """Width × height of a picture."""
        ...

    async def open_all(
        self,
        parts: Sequence[MediaPart],
        tenant: str,
        options: Mapping[str, object] | None = None,
        request: MediaRequest | None = None,
    ) -> Sequence[OpenedMedia]:
        """Fetches the items of one prompt and counts them; the first that fails ends the others.

        `tenant`: An opaque id of the API key. `options`: Of the model's processor. `request`: None for a prompt that
        is a request by itself.

        Raises:
            InvalidRequestError: One cannot be had, is none, or exceeds a limit, or they have more vectors than the
                context has places; `param` names the part.
            ServerOverloadedError: Too much is waiting or held.
        """
        ...

    async def start(self) -> None:
        """Starts what decodes, before an item needs it."""
        ...
