"""Sound that comes in pieces is that of a file with the same bytes, and is bounded in time and room."""

from __future__ import annotations

import asyncio
import io
import tempfile
import wave
from pathlib import Path

import numpy as np
import pytest

from llmstack_media.audio.files import SoundFiles
from llmstack_types import InvalidRequestError, ServerOverloadedError

RATE = 16_000


def pcm(rate: int, num_samples: int) -> bytes:
    seconds = np.arange(num_samples) / rate
    loud = (np.sin(seconds * 3) > 0) * np.sin(2 * np.pi * 440 * seconds)
    return (loud * 30_000 + np.random.default_rng(1).integers(-900, 900, num_samples)).astype("<i2").tobytes()


@pytest.mark.parametrize(("rate", "num_samples"), [(16_000, 40_001), (24_000, 70_007), (48_000, 100_003)])
async def test_live_sound_is_that_of_a_file_with_the_same_bytes(tmp_path: Path, rate: int, num_samples: int) -> None:
    data, files = pcm(rate, num_samples), SoundFiles(RATE, folder=str(tmp_path))
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(data)
    with (tmp_path / "x.wav").open("rb") as file:
        sound = await files.open(file)
    live, sizes, start = await files.begin(rate), (2, 6400, 100_000, 48_002), 0
    for size in (*sizes, len(data)):
        await live.add(data[start : start + size])
        start += size
    assert not live.has_ended
    await live.end()
    await live.end()
    assert live.num_samples == sound.num_samples
    assert live.levels == sound.levels
    assert np.array_equal(await live.read(0, 10**9), await sound.read(0, 10**9))
    assert np.array_equal(await live.read(500, 900), await sound.read(500, 900))
    sound.close()
    live.close()
    live.close()
    with pytest.raises(ValueError, match="closed"):
        await live.read(0, 1)
    with pytest.raises(ValueError, match="closed"):
        await live.add(b"\0\0" * 16_000)
    await files.shutdown()


async def test_who_waits_for_growth_reads_what_is_there() -> None:
    live = await SoundFiles(RATE).begin(RATE)
    waiting = asyncio.create_task(live.wait_for_growth(100))
    await live.add(b"\0\0" * 100)
    await asyncio.sleep(0)
    assert not waiting.done()
    await live.add(b"\0\0")
    await asyncio.wait_for(waiting, 5)
    waiting = asyncio.create_task(live.wait_for_growth(10**9))
    await live.end()
    await asyncio.wait_for(waiting, 5)
    live.close()


async def test_time_and_room_are_bounded() -> None:
    files = SoundFiles(RATE, max_s=2.0, max_disk_bytes=3 << 20)
    live = await files.begin(24_000, "a")
    with pytest.raises(InvalidRequestError) as odd:
        await live.add(b"\0\0\0")
    assert odd.value.code == "invalid_audio"
    await live.add(b"\0\0" * 47_000)
    with pytest.raises(InvalidRequestError) as late:
        await live.add(b"\0\0" * 2000)
    assert late.value.code == "audio_too_long"
    await live.add(b"\0\0" * 1000)
    other = await files.begin(RATE, "a")
    with pytest.raises(ServerOverloadedError):  # a key has at most as much as it leaves free
        await other.add(b"\0\0")
    foreign = await files.begin(RATE, "b")
    await foreign.add(b"\0\0")
    for one in (live, other, foreign):
        one.close()
    again = await files.begin(RATE, "a")
    await again.add(b"\0\0")
    again.close()


async def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "no space left")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir=None: Full())
    live = await SoundFiles(RATE).begin(RATE)
    with pytest.raises(ServerOverloadedError, match="no room"):
        await live.add(b"\0\0")
    live.close()
