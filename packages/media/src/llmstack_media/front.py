"""Media of requests: fetch, digest, header, then the store or a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmstack_media.budgets import FairBudget
from llmstack_media.errors import (
    counted_refusals,
    fetch_failed,
    invalid_option,
    media_not_found,
    named_refusals,
    unknown_option,
)
from llmstack_media.fetch.data_urls import check_length
from llmstack_media.fetch.fetcher import Fetcher, is_inline
from llmstack_media.limits import MediaLimits
from llmstack_media.parts import AskedPart, MediaStats, Part, digest_of
from llmstack_media.pool.client import PicturePool
from llmstack_media.processors.checkpoints import Processors, processors
from llmstack_media.processors.layout import Piece
from llmstack_media.processors.processor import ItemProcessor
from llmstack_media.sources import HeldSource, RequestSources, SourceBytes
from llmstack_media.store import Counted, Entry, Key, MediaStore, PreparedMedia
from llmstack_media.together import run_together
from llmstack_types import ServerOverloadedError
from llmstack_types.media import memory_name
from llmstack_types.vocabulary import ImageDetail, words_of

DETAILS: Final = words_of(ImageDetail)
_HASH_IN_THREAD_BYTES: Final = 1 << 18
_MAX_FETCHES: Final = 32
_MAX_KEY_FETCHES: Final = 8
_MAX_UUID_LENGTH: Final = 256
_MAX_PLACES: Final = 8


class OpenedMedia:
    """An item that is counted and not kept decoded. `prepare` or `close` follows.

    Attributes:
        digest: Names its vectors, as `MediaItem.digest`.
        layout: What it becomes.
        pieces: What stands in the prompt for it.
    """

    def __init__(
        self, front: MediaFront, asked: AskedPart, key: Key, counted: Counted, source: HeldSource | None
    ) -> None:
        self._front = front
        self._asked = asked
        self._key = key
        self._counted = counted
        self._source = source
        self.digest = key[1]
        self.layout = counted.layout
        self.pieces: tuple[Piece, ...] = asked.processor.placeholders(counted.layout)

    async def prepare(self) -> PreparedMedia:
        """The item as an encoder reads it, from the store or decoded now.

        Raises:
            InvalidRequestError: It is damaged, takes too long, or is kept no more under its `uuid`.
            ServerOverloadedError: There is no memory or no time for it.
        """
        with named_refusals(self._asked.part.param, self._asked.part.kind):
            entry = await self._front._entry(self._key, self._asked, self._counted, self._source)
        self._source = None
        return PreparedMedia(self._front._store, entry, self._asked.part.kind)

    def close(self) -> None:
        """Forgets what was fetched. Idempotent; otherwise that ends with this object."""
        if self._source is not None:
            self._source.free()


class MediaFront:
    """Pictures, videos and sounds of one model's requests. Used by one event loop.

    `open_all` fetches them and reads their headers: a request is counted and refused before anything is decoded. How
    long a sound is its header does not say for certain, so sounds are decoded to be counted, and nothing is kept.
    """

    def __init__(
        self,
        files: Mapping[str, Any],
        fetcher: Fetcher,
        *,
        limits: MediaLimits | None = None,
        cache_bytes: int = 4 << 30,
        max_held_bytes: int = 4 << 30,
        background: tuple[int, int, int] | None = None,
        video_options: Mapping[str, object] | None = None,
    ) -> None:
        """Takes the parts and limits of the front end.

        Args:
            files: The arguments of `processors`.
            fetcher: Fetches what a URL names.
            limits: Of each picture and of all.
            cache_bytes: Of pictures that are kept for later requests.
            max_held_bytes: Of pictures that running requests use.
            background: Of transparent parts; None for white.
            video_options: Of the video processor, for requests that do not give them.

        Raises:
            ProcessorConfigError: The checkpoint is not supported.
        """
        self._limits = limits or MediaLimits()
        self._processors = processors(**files)
        self._video_options = video_options or {}
        self._option_names = {name for one in self._processors if one is not None for name in one.options}
        self._background = background
        self._fetcher = fetcher
        self._pool = PicturePool(files, self._limits, background)
        self._store = MediaStore(cache_bytes, max_held_bytes)
        self._pixels = FairBudget(self._limits.max_pixels_at_once, self._limits.max_key_pixels_at_once)
        self._places = FairBudget(_num_places(), max(1, _num_places() - 1))
        self._fetches = FairBudget(_MAX_FETCHES, _MAX_KEY_FETCHES)
        self._sources = SourceBytes(self._limits.max_source_bytes, self._limits.max_request_bytes)
        self._making: dict[Key, _Making] = {}
        self._num_bytes = 0
        self._fetch_results: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    @property
    def processors(self) -> Processors:
        """The processors of requests without options."""
        return self._processors

    @property
    def limits(self) -> MediaLimits:
        """The limits of each picture and of all."""
        return self._limits

    @property
    def store(self) -> MediaStore:
        """The kept media, for metrics."""
        return self._store

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far, for metrics."""
        return MediaStats(
            self._store.num_queries, self._store.num_hits, self._num_bytes, self._pool.processor_s,
            dict(self._fetch_results), dict(self._failures),
        )  # fmt: skip

    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuses options that no request could have, as `open_all` does."""
        for name in options:
            if name not in self._option_names:
                raise unknown_option(name, sorted(self._option_names))
        if (image := self._processors.image) is not None:
            image.with_options({name: value for name, value in options.items() if name in image.options})

    def of_request(self, tenant: str) -> RequestSources:
        """The sum of one request, for several `open_all`."""
        return self._sources.of_request(tenant)

    async def open_all(
        self,
        parts: Sequence[Part],
        tenant: str = "",
        options: Mapping[str, object] | None = None,
        *,
        request: RequestSources | None = None,
        on_counted: Callable[[Part, OpenedMedia], None] | None = None,
    ) -> list[OpenedMedia]:
        """Fetches the pictures of one request and counts them. Nothing is decoded.

        What has its content with it is counted first, and the text of every URL is checked, so that a request that is
        refused has fetched as little as possible. The first picture that fails ends the others.

        Args:
            parts: What the request says of them.
            tenant: An opaque id of the API key.
            options: Of the model's image processor, by the request.
            request: The sum that these pictures are part of; None for one of their own.
            on_counted: Called with each as its header is read. What it raises ends the others.

        Raises:
            InvalidRequestError: One cannot be had, is no picture, or exceeds a limit; `param` names the part.
            ServerOverloadedError: Too much is waiting or held.
        """
        asked = [self._checked(part, options or {}) for part in parts]
        request = request or self.of_request(tenant)
        sources = [request.hold() for _ in parts]
        opened: dict[int, OpenedMedia] = {}

        async def open_one(index: int) -> OpenedMedia:
            one = await self._open(asked[index], tenant, sources[index])
            if on_counted is not None:
                on_counted(parts[index], one)
            return one

        try:
            for is_fetched in (False, True):
                indices = [index for index, part in enumerate(parts) if _is_fetched(part) == is_fetched]
                found = await run_together([open_one(index) for index in indices])
                opened.update(zip(indices, found, strict=True))
        except BaseException:
            for source in sources:
                source.free()
            raise
        return [opened[index] for index in range(len(parts))]

    async def open(
        self,
        part: Part,
        tenant: str = "",
        options: Mapping[str, object] | None = None,
        content: bytes | None = None,
    ) -> OpenedMedia:
        """Opens the media of a request with one picture.

        `content`: The bytes, where the caller has them; the URL is not looked at then.
        """
        if content is None:
            return (await self.open_all([part], tenant, options))[0]
        with named_refusals(part.param):
            asked = self._asked(part, options or {})
        return await self._open(asked, tenant, self._sources.of_request(tenant).hold(), content)

    async def _open(
        self, asked: AskedPart, tenant: str, source: HeldSource, content: bytes | None = None
    ) -> OpenedMedia:
        part = asked.part
        with named_refusals(part.param, part.kind):
            if not part.url and not part.path and content is None:
                return self._known(asked, tenant)
            digest = await self._read(source, asked, tenant, content)
            counted = self._store.counted((tenant, digest))
            if counted is None:
                counted = await self._count(tenant, asked, source.data)
                self._store.remember((tenant, digest), counted)
            if part.uuid:
                self._store.set_alias(tenant, asked.alias, digest)
            return OpenedMedia(self, asked, (tenant, digest), counted, source)

    async def _read(self, source: HeldSource, asked: AskedPart, tenant: str, content: bytes | None) -> bytes:
        """Reads the bytes of a picture into its source; the digest of what it becomes."""
        if content is None:
            source.data = await self._fetched(asked.part, tenant, source)
        else:
            check_length(len(content), self._limits.max_bytes)
            source.reserve(len(content))
            source.data = content
        check_length(len(source.data), self._limits.max_bytes)
        self._num_bytes += len(source.data)
        is_long = len(source.data) > _HASH_IN_THREAD_BYTES
        work = (asked.names, source.data)
        return await asyncio.to_thread(digest_of, *work) if is_long else digest_of(*work)

    async def start(self) -> None:
        """Starts the process that reads pictures, for which the first picture would wait most of a second.

        Where it cannot be started, the first picture tries again and says so.
        """
        with contextlib.suppress(ServerOverloadedError):
            await self._pool.start()

    async def shutdown(self) -> None:
        """Ends the children and frees all memory. Idempotent, and final."""
        tasks = [making.task for making in self._making.values()]
        await self._pool.shutdown()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    def _asked(self, part: Part, options: Mapping[str, object]) -> AskedPart:
        if part.detail not in DETAILS:
            raise invalid_option("detail", f"one of {', '.join(DETAILS)}")
        if len(part.uuid) > _MAX_UUID_LENGTH:
            raise invalid_option("uuid", f"at most {_MAX_UUID_LENGTH} characters long")
        processor, own = self._with_options(part, options)
        names = (("kind", part.kind), ("background", repr(self._background)), *processor.identity())
        return AskedPart(part, own, processor, names)

    def _with_options(
        self, part: Part, options: Mapping[str, object]
    ) -> tuple[ItemProcessor[Any], Mapping[str, object]]:
        """The processor of a part, and the options that are its own; others may be of other parts."""
        found: ItemProcessor[Any] | None = self._processors._asdict().get(part.kind)
        if found is None:
            raise invalid_option("type", "that of another kind: this model takes no such items")
        self.check_options(options)
        defaults = self._video_options if part.kind == "video" else {}
        own = {**defaults, **{name: value for name, value in options.items() if name in found.options}}
        return found.for_detail(part.detail).with_options(own), own

    def _checked(self, part: Part, options: Mapping[str, object]) -> AskedPart:
        with named_refusals(part.param, part.kind):
            asked = self._asked(part, options)
            if part.url and not part.path:
                with counted_refusals(self._fetch_results):
                    self._fetcher.check(part.url)
            return asked

    async def _fetched(self, part: Part, tenant: str, source: HeldSource) -> bytes:
        async with self._fetches.hold(tenant, 1):
            with counted_refusals(self._fetch_results):
                fetcher = self._fetcher
                read = fetcher.read(part.path, source.reserve) if part.path else fetcher.fetch(part.url, source.reserve)
                data = await read
        self._fetch_results["ok"] += 1
        return data

    def _known(self, asked: AskedPart, tenant: str) -> OpenedMedia:
        """An item that its key sent before, by its name alone."""
        digest = self._store.find_alias(tenant, asked.alias) if asked.part.uuid else None
        counted = None if digest is None else self._store.counted((tenant, digest))
        if digest is None or counted is None:
            raise (
                media_not_found()
                if asked.part.uuid
                else fetch_failed(f"An item of the kind {asked.part.kind} needs a URL or a uuid")
            )
        return OpenedMedia(self, asked, (tenant, digest), counted, None)

    async def _count(self, tenant: str, asked: AskedPart, data: bytes) -> Counted:
        async with self._places.hold(tenant, 1):
            with counted_refusals(self._failures):
                return Counted(*await self._pool.count(data, asked.processor))

    async def _entry(self, key: Key, asked: AskedPart, counted: Counted, source: HeldSource | None) -> Entry:
        """The entry of a picture, held once more. Those that want the same one at once wait for one decode."""
        entry = self._store.acquire(key)
        if entry is not None:
            return entry
        if source is None:
            raise media_not_found()
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = _Making()
            making.task = asyncio.create_task(self._make(making, key, asked, counted, source))
            making.task.add_done_callback(_retrieve)
        making.num_waiting += 1
        try:
            return await asyncio.shield(making.task)
        except asyncio.CancelledError:
            if making.entry is None:
                making.num_waiting -= 1
            else:
                self._store.release(making.entry)
            raise

    async def _make(self, making: _Making, key: Key, asked: AskedPart, counted: Counted, source: HeldSource) -> Entry:
        """Decodes a picture, and holds it once for each that waits."""
        tenant, layout = key[0], counted.layout
        try:
            async with self._pixels.hold(tenant, counted.num_pixels), self._places.hold(tenant, 1):
                self._store.reserve(tenant, layout.num_bytes)
                try:
                    with counted_refusals(self._failures):
                        memory = await self._pool.prepare(
                            source.data, memory_name(key[1]), layout, asked.part.kind, asked.part.detail, asked.options
                        )
                except BaseException:
                    self._store.cancel(tenant, layout.num_bytes)
                    raise
            entry = making.entry = self._store.add(key, layout, memory)
            for _ in range(making.num_waiting):
                self._store.hold(entry)
            self._store.release(entry)
            return entry
        finally:
            del self._making[key]


def _is_fetched(part: Part) -> bool:
    return bool(part.path) or (bool(part.url) and not is_inline(part.url))


@dataclass(slots=True, eq=False)
class _Making:
    """A picture that is being decoded, and how many wait for it."""

    task: asyncio.Task[Entry] = field(init=False)
    num_waiting: int = 0
    entry: Entry | None = None


def _num_places() -> int:
    """Pictures that are read at once."""
    return min(_MAX_PLACES, max(2, len(os.sched_getaffinity(0))))


def _retrieve(task: asyncio.Task[Entry]) -> None:
    """Looks at the exception of a decode that no request waits for any longer."""
    if not task.cancelled():
        task.exception()
