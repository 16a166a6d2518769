"""Sound files of requests, with real child processes: decoded to a disk, refused by name, closed with their request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from media_helpers.sounds import encoded, pcm16, tone, wav

from llmstack_media.audio.files import Sound, SoundFiles
from llmstack_types import InvalidRequestError, ServerOverloadedError


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[SoundFiles]:
    files = SoundFiles(16_000, max_s=5.0, folder=str(tmp_path))
    yield files
    await files.shutdown()


async def opened(files: SoundFiles, data: bytes, tenant: str = "") -> Sound:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return await files.open(file, tenant)


async def refused(files: SoundFiles, data: bytes) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        (await opened(files, data)).close()
    assert caught.value.param == "file"
    return caught.value.code


async def test_a_file_becomes_samples_on_the_disk_with_their_levels(files: SoundFiles) -> None:
    samples = np.concatenate([np.zeros(8000, np.float32), tone(1.01)])
    sound = await opened(files, wav(pcm16(samples)))
    assert sound.num_samples == len(samples)
    assert sound.duration_s == pytest.approx(1.51)
    assert np.abs(await sound.read(7000, 9000) - samples[7000:9000]).max() < 1e-4
    assert len(await sound.read(20_000, 99_000)) == len(samples) - 20_000
    assert len(sound.levels) == 76
    assert list(sound.levels[:25]) == [0.0] * 25
    assert sound.levels[30] == pytest.approx(0.5 / 2**0.5, rel=0.01)
    assert files.decoded_s == sound.duration_s
    sound.close()
    sound.close()
    with pytest.raises(ValueError, match="closed"):
        await sound.read(0, 1)


async def test_files_are_refused_by_what_they_are(files: SoundFiles) -> None:
    assert await refused(files, b"#!/bin/sh") == "unsupported_media_format"
    assert await refused(files, wav(pcm16(tone(0.05)))) == "audio_too_short"
    assert await refused(files, wav(b"")) == "audio_too_short"
    assert await refused(files, wav(pcm16(tone(6.0)), size=0)) == "audio_too_long"
    assert await refused(files, wav(b"\1\2", channels=0)) == "invalid_audio"
    assert files.failures.total() == 5


async def test_what_is_decoded_at_once_is_bounded_by_its_room(tmp_path: Path) -> None:
    files = SoundFiles(16_000, folder=str(tmp_path), max_disk_bytes=100_000)
    data = wav(pcm16(tone(1.0)))
    sound = await opened(files, data, "one")
    with pytest.raises(ServerOverloadedError):
        await opened(files, data, "one")
    sound.close()
    (await opened(files, data, "one")).close()
    await files.shutdown()


async def test_a_request_that_ends_while_it_is_decoded_leaves_nothing(files: SoundFiles) -> None:
    opening = asyncio.create_task(opened(files, wav(pcm16(tone(4.0, 96_000)), rate=96_000)))
    await asyncio.sleep(0.05)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*files._jobs, return_exceptions=True), 60)
    assert not files._jobs
    (await opened(files, wav(pcm16(tone())))).close()


FORMATS = [
    ("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus"), ("webm", "libopus"), ("matroska", "aac"), ("adts", "aac"),
    ("mp4", "aac"), ("wav", "adpcm_ms"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "codec"), FORMATS)
async def test_compressed_formats_are_decoded_by_pyav(files: SoundFiles, kind: str, codec: str) -> None:
    data = encoded(kind, tone(2.0, 48_000), codec)
    with contextlib.closing(await opened(files, data)) as sound:
        assert sound.duration_s == pytest.approx(2.0, abs=0.1)
        samples = await sound.read(8000, 24_000)
    assert float(np.sqrt(np.square(samples).mean())) == pytest.approx(0.5 / 2**0.5, rel=0.05)
    half = data[: len(data) // 2]
    if kind == "mp4":  # its index is at the end
        assert await refused(files, half) == "invalid_audio"
    else:
        with contextlib.closing(await opened(files, half)) as sound:
            assert 0.2 < sound.duration_s < 2.0
    assert await refused(files, data[:60]) in ("invalid_audio", "audio_too_short")


async def test_a_video_has_its_first_sound_and_one_without_is_refused_in_words(files: SoundFiles) -> None:
    data = encoded("mp4", tone(2.0, 48_000), "aac", with_video=True)
    with contextlib.closing(await opened(files, data)) as sound:
        assert sound.duration_s == pytest.approx(2.0, abs=0.1)
    with pytest.raises(InvalidRequestError, match="has no sound in it"):
        await opened(files, encoded("mp4", tone(0.0), "", with_video=True))


async def test_a_small_file_of_long_silence_is_refused_by_its_seconds(files: SoundFiles) -> None:
    data = encoded("ogg", np.zeros(48_000 * 60, np.float32), "libopus")
    assert len(data) < 60_000
    assert await refused(files, data) == "audio_too_long"


async def test_a_text_that_names_an_address_opens_none(files: SoundFiles) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    for head in (b"ID3\4\0\0\0\0\0\0", b"OggS", b"\0\0\0\x18ftypisom", b"fLaC", b"\x1aE\xdf\xa3"):
        for text in (
            b"v=0\r\nm=audio 5004 RTP/AVP 0\r\n",
            b"#EXTM3U\nhttp://127.0.0.1:9/a.ts\n",
            np.random.default_rng(7).bytes(5000),
        ):
            assert await refused(files, head + text) in ("invalid_audio", "audio_too_short")


def test_without_pyav_a_compressed_file_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmstack_media.sound import av_blocks, samples

    monkeypatch.setattr(av_blocks, "has_av", lambda: False)
    with pytest.raises(InvalidRequestError, match=r"llmstack-media\[av\]") as caught:
        list(samples.sound_samples(io.BytesIO(b"fLaC" + bytes(100)), 16_000, 10.0))
    assert caught.value.code == "unsupported_media_format"
