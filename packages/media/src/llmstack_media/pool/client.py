"""Client of the process that reads pictures, videos and sounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from llmstack_media.decode.clips import Clip
from llmstack_media.errors import audio_too_long, image_too_large, invalid_audio, invalid_image
from llmstack_media.limits import MediaLimits
from llmstack_media.memory import SealedMemory
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import ImageProcessor, ItemProcessor
from llmstack_media.processors.sound import SoundProcessor
from llmstack_media.processors.video import VideoProcessor
from llmstack_types import InvalidRequestError, ServerOverloadedError
from llmstack_types.child_pool.client import ChildPool
from llmstack_types.lifecycle import ClosingParts
from llmstack_types.vocabulary import MediaKind

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries start no threads in the process that forks."""
_HEADER_S = 1.0


class PicturePool(ClosingParts):
    """Headers and arrays of items, from children. Used by one event loop.

    Attributes:
        processor_s: Processor time of the jobs so far.
    """

    def __init__(
        self, files: Mapping[str, Any], limits: MediaLimits, background: tuple[int, int, int] | None = None
    ) -> None:
        """`files`: The arguments of `processors`. `background`: Of transparent parts; None for white."""
        self.processor_s = 0.0
        self._limits = limits
        configuration = {"files": dict(files), "limits": asdict(limits), "background": background}
        self._pool = ChildPool(
            "llmstack_media.pool.process", configuration, purpose="reads images", reason="media", variables=ONE_THREAD
        )
        super().__init__(self._pool)

    async def start(self) -> None:
        """Starts the process; raises ServerOverloadedError if it cannot be started."""
        await self._pool.start()

    async def size(self, data: bytes) -> tuple[int, int]:
        """Width and height of a picture as it is shown, without a decode.

        Raises:
            InvalidRequestError: It is none of an allowed format, or exceeds a limit.
            ServerOverloadedError: The machine is too busy, there is no memory, or the process cannot be started.
        """
        with contextlib.closing(_memory(lambda: SealedMemory.of(data))) as source:
            answer = await self._run({"do": "header", "source": source.place}, _HEADER_S, is_slow=False)
        return answer["width"], answer["height"]

    async def clip(self, data: bytes) -> Clip:
        """Frames, time and size of a video, without a decode; raises as `size`."""
        with contextlib.closing(_memory(lambda: SealedMemory.of(data))) as source:
            return Clip(**await self._run({"do": "clip", "source": source.place}, _HEADER_S, is_slow=False))

    async def num_samples(self, data: bytes, max_s: float) -> int:
        """Samples of a sound at the rate of the model, at most `max_s` seconds: decoded, counted, and not kept.

        Raises:
            InvalidRequestError: It is none of an allowed format, damaged, too short or too long.
            ServerOverloadedError: As `size`.
        """
        with contextlib.closing(_memory(lambda: SealedMemory.of(data))) as source:
            job = {"do": "sound", "source": source.place, "max_s": max_s}
            answer = await self._run(job, self._limit_s("audio", max_s), "audio", is_slow=True)
        num_samples: int = answer["num_samples"]
        return num_samples

    async def count(self, data: bytes, processor: ItemProcessor[Any]) -> tuple[ImageLayout, int]:
        """The layout of an item, and the pixels or samples that are decoded for it; raises as the methods above."""
        if isinstance(processor, SoundProcessor):
            num_samples = await self.num_samples(data, min(processor.max_s, self._limits.max_audio_s))
            return processor.layout(num_samples), num_samples
        if isinstance(processor, VideoProcessor):
            clip = await self.clip(data)
            found = processor.layout(clip)
            return found, clip.num_decoded(found.frames) * clip.width * clip.height
        width, height = await self.size(data)
        image: ImageProcessor = processor  # type: ignore[assignment]  # of what is none of these
        return image.layout(width, height), width * height

    async def prepare(
        self, data: bytes, name: str, layout: ImageLayout, kind: MediaKind, detail: str, options: Mapping[str, Any]
    ) -> SealedMemory:
        """The array of an item, in sealed memory of this name, which is the caller's to close.

        Raises:
            InvalidRequestError: It is damaged, or takes too long.
            ServerOverloadedError: The machine is too busy, there is no memory, or the process cannot be started.
        """
        limit_s = self._limit_s(kind, self._limits.max_audio_s)
        with contextlib.closing(_memory(lambda: SealedMemory.of(data))) as source:
            target = _memory(lambda: SealedMemory(layout.num_bytes, name))
            job = {
                "do": "prepare", "source": source.place, "target": target.place, "shape": list(layout.shape),
                "kind": kind, "detail": detail, "options": dict(options),
            }  # fmt: skip
            try:
                await self._run(job, limit_s, kind, is_slow=True)
                target.seal()
            except BaseException:
                target.close()
                raise
        return target

    def _limit_s(self, kind: MediaKind, max_s: float) -> float:
        """Processor time of an item; `max_s` is the most that a sound is long."""
        limits = self._limits
        if kind == "audio":
            return limits.decode_s + max_s / limits.sounds_per_s
        return limits.video_decode_s if kind == "video" else limits.decode_s

    async def _run(
        self, job: dict[str, Any], limit_s: float, kind: MediaKind = "image", *, is_slow: bool
    ) -> dict[str, Any]:
        outcome = await self._pool.run(job, limit_s=limit_s, is_slow=is_slow)
        self.processor_s += outcome.processor_s
        if outcome.is_starved:
            raise ServerOverloadedError("no processor time to read media", reason="media")
        if outcome.is_late:
            refusal = audio_too_long if kind == "audio" else image_too_large
            raise refusal(f"takes longer than {limit_s:g} s to read")
        if outcome.answer is None:
            refusal = invalid_audio if kind == "audio" else invalid_image
            raise refusal("cannot be read: its decoder fails over it or runs out of memory")
        if error := outcome.answer.get("error"):
            raise InvalidRequestError(error["message"], code=error["code"])
        return outcome.answer


def _memory(take: Callable[[], SealedMemory]) -> SealedMemory:
    try:
        return take()
    except OSError as error:
        raise ServerOverloadedError("there is no memory for media", reason="media") from error
