"""Sound files of requests, decoded by a child into a file of samples."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections import Counter
from typing import BinaryIO, Final

from llmstack_media.audio.live_sound import LiveSound
from llmstack_media.audio.stored_sound import SAMPLE_BYTES, StoredSound
from llmstack_media.budgets import FairBudget
from llmstack_media.errors import audio_too_long, counted_refusals, invalid_audio, named_refusals, no_room
from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.limits import DECODED_PER_S
from llmstack_media.memory import place_of
from llmstack_media.pool.client import ONE_THREAD
from llmstack_media.shares import Shares
from llmstack_media.sound.samples import check_least
from llmstack_types import InvalidRequestError, ServerOverloadedError
from llmstack_types.child_pool.client import ChildPool

_MAX_PLACES: Final = 2
_MAX_FETCHES: Final = 8
_DECODE_S: Final = 10.0


class Sound(StoredSound):
    """A decoded file: samples in `file`, and its levels behind them."""

    def __init__(self, file: BinaryIO, num_samples: int, rate: int, shares: Shares, tenant: str) -> None:
        super().__init__(file, rate, shares, tenant)
        self.num_samples = num_samples
        self._num_bytes = os.fstat(file.fileno()).st_size
        self.levels.frombytes(os.pread(file.fileno(), self._num_bytes, num_samples * SAMPLE_BYTES))


class SoundFiles:
    """Sound files of one model's requests. Used by one event loop.

    Attributes:
        failures: Refused files by the code of their refusal.
        processor_s: Processor time of decoding.
        decoded_s: Seconds of sound that were decoded.
    """

    def __init__(
        self,
        rate: int,
        fetcher: Fetcher | None = None,
        *,
        max_s: float = 7200.0,
        folder: str | None = None,
        max_disk_bytes: int = 4 << 30,
    ) -> None:
        """Takes the limits of the files.

        Args:
            rate: Of the model, in Hz.
            fetcher: Fetches what a URL names; None for `data:` URLs alone.
            max_s: Seconds of one file.
            folder: Where decoded files are while they are used; None for the system's folder of temporary files.
            max_disk_bytes: Of all decoded files. A tenant has at most as much as it leaves free.
        """
        self.failures: Counter[str] = Counter()
        self.processor_s = 0.0
        self.decoded_s = 0.0
        self._rate = rate
        self._fetcher = fetcher or Fetcher(FetchPolicy())
        self._fetches = FairBudget(_MAX_FETCHES, _MAX_FETCHES // 2)
        self._max_s = max_s
        self._folder = folder
        self._places = FairBudget(_MAX_PLACES, _MAX_PLACES)
        self._shares = Shares(max_disk_bytes)
        self._jobs: set[asyncio.Task[int]] = set()
        configuration = {"rate": rate, "max_s": max_s}
        self._pool = ChildPool(
            "llmstack_media.audio.process", configuration, purpose="reads audio", reason="media", variables=ONE_THREAD
        )

    async def open(self, source: BinaryIO, tenant: str = "", param: str = "file") -> Sound:
        """The sound of an open file, which stays the caller's.

        Args:
            source: Of any allowed format; a file or memory with a descriptor.
            tenant: An opaque id of the API key.
            param: The field of the request, for messages.

        Raises:
            InvalidRequestError: It is damaged, of no allowed format, too short or too long.
            ServerOverloadedError: There is no room or no time for it.
        """
        with named_refusals(param), counted_refusals(self.failures):
            file = await asyncio.to_thread(self._new_file)
            try:
                num_samples = await self._decoded(source, file, tenant)
                check_least(num_samples, self._rate)
                self.decoded_s += num_samples / self._rate
                if not self._shares.take(tenant, os.fstat(file.fileno()).st_size):
                    raise no_room()
                return Sound(file, num_samples, self._rate, self._shares, tenant)
            except BaseException:
                file.close()
                raise

    async def fetch(self, url: str, tenant: str = "", param: str = "file_url") -> Sound:
        """The sound of what a URL names; raises as `open`, and where the URL is not allowed or gives nothing."""
        async with self._fetches.hold(tenant, 1):  # its bytes are in memory until they are in a file
            with named_refusals(param), counted_refusals(self.failures):
                data = await self._fetcher.fetch(url)
            with await asyncio.to_thread(self._new_file) as file:
                await asyncio.to_thread(_write, file, data)
                del data
                return await self.open(file, tenant, param)

    async def begin(self, given_rate: int, tenant: str = "") -> LiveSound:
        """Sound that is yet to come, of `given_rate` Hz; see `LiveSound`.

        Raises:
            ServerOverloadedError: There is no room for it.
        """
        file = await asyncio.to_thread(self._new_file)
        return LiveSound(file, given_rate, self._rate, self._shares, tenant, self._max_s)

    async def start(self) -> None:
        """Starts the process that decodes, for which the first file would wait; if it cannot, that file says so."""
        with contextlib.suppress(ServerOverloadedError):
            await self._pool.start()

    async def shutdown(self) -> None:
        """Ends the children. Idempotent, and final."""
        await self._pool.shutdown()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _new_file(self) -> BinaryIO:
        try:
            return tempfile.TemporaryFile(dir=self._folder)
        except OSError as error:
            raise no_room() from error

    async def _decoded(self, source: BinaryIO, target: BinaryIO, tenant: str) -> int:
        """The number of samples, once a child has written them. A job whose request has ended keeps its place."""
        job = asyncio.create_task(self._run(place_of(source.fileno()), place_of(target.fileno()), tenant))
        self._jobs.add(job)
        job.add_done_callback(self._end_job)
        return await asyncio.shield(job)

    def _end_job(self, job: asyncio.Task[int]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # that of a job whose request has ended is looked at here

    async def _run(self, source: dict[str, object], target: dict[str, object], tenant: str) -> int:
        async with self._places.hold(tenant, 1):
            limit_s = _DECODE_S + self._max_s / DECODED_PER_S
            outcome = await self._pool.run({"source": source, "target": target}, limit_s=limit_s, is_slow=True)
        self.processor_s += outcome.processor_s
        if outcome.is_starved:
            raise ServerOverloadedError("no processor time to read audio", reason="media")
        if outcome.is_late:
            raise audio_too_long(f"takes longer than {limit_s:g} s to read")
        if outcome.answer is None:
            raise invalid_audio("cannot be read: its decoder fails over it")
        if error := outcome.answer.get("error"):
            raise InvalidRequestError(error["message"], code=error["code"])
        if "is_full" in outcome.answer:
            raise no_room()
        return int(outcome.answer["num_samples"])


def _write(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise no_room() from error
