"""Sounds of requests, with real child processes: counted while they are decoded, kept by digest, apart for each key."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from media_helpers.sounds import pcm16, tone, wav

from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.front import MediaFront
from llmstack_media.limits import MediaLimits
from llmstack_media.parts import MediaPart
from llmstack_types import InvalidRequestError

FILES: dict[str, Any] = {
    "preprocessor": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 2},
    "model": {"model_type": "qwen2_audio"},
}
SOUND = wav(pcm16(tone(1.3)))


@pytest.fixture
async def front() -> AsyncIterator[MediaFront]:
    front = MediaFront(FILES, Fetcher(FetchPolicy()), limits=MediaLimits(max_audio_s=1.8))
    yield front
    await front.shutdown()


def part(data: bytes = SOUND, **fields: Any) -> MediaPart:
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    return MediaPart(**{"url": url, "param": "messages[0]", "kind": "audio", **fields})


async def refusal(front: MediaFront, one: MediaPart, **options: Any) -> tuple[str | None, str | None]:
    with pytest.raises(InvalidRequestError) as caught:
        await front.open_all([one], "a", options)
    return caught.value.code, caught.value.param


async def test_a_sound_is_counted_then_prepared_then_found(front: MediaFront) -> None:
    (opened,) = await front.open_all([part(uuid="mine")], "a")
    assert [(piece.text, piece.num_vectors) for piece in opened.pieces] == [("<|AUDIO|>", 32)]
    assert (opened.layout.grid, opened.layout.num_units, len(front.store)) == ((131,), 65, 0)
    prepared = await opened.prepare()
    item = prepared.item(2, 32)
    assert (item.kind, item.layout, item.num_units) == ("audio", (131,), 65)
    assert item.memory is not None
    processor = front.processors.audio
    assert processor is not None
    samples = np.frombuffer(pcm16(tone(1.3)), "<i2").astype(np.float32) / np.float32(32768)
    read = np.fromfile(item.memory.path, dtype=np.float32).reshape(16, 131)
    assert np.array_equal(read, processor.log_mel.compute(samples)[:, :131])
    spent = front._pool.processor_s
    (again,) = await front.open_all([part(url="", uuid="mine")], "a")
    assert (await again.prepare()).item(2, 32) == item
    assert front._pool.processor_s == spent  # nothing is decoded again
    assert await refusal(front, part(url="", uuid="other")) == ("media_not_found", "messages[0]")
    with pytest.raises(InvalidRequestError):
        await front.open_all([part(url="", uuid="mine")], "another key")


async def test_what_is_no_sound_is_refused_by_name(front: MediaFront) -> None:
    refused = {
        "audio_too_long": wav(pcm16(tone(1.9))), "audio_too_short": wav(pcm16(tone(0.05))),
        "invalid_audio": SOUND[:30], "unsupported_media_format": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
    }  # fmt: skip
    for code, data in refused.items():
        assert await refusal(front, part(data)) == (code, "messages[0]"), code
    assert await refusal(front, part(url="data:audio/wav;base64,?")) == ("invalid_audio", "messages[0]")
    assert await refusal(front, part(kind="image")) == ("invalid_value", "messages[0]")
    assert await refusal(front, part(), max_pixels=9) == ("invalid_value", "messages[0]")
    assert len(front.store) == 0
    assert front.stats.failures == {
        "audio_too_long": 1, "audio_too_short": 1, "invalid_audio": 1, "unsupported_media_format": 1
    }  # fmt: skip


async def test_a_long_sound_in_a_few_bytes_is_refused_before_anything_is_kept(front: MediaFront) -> None:
    """Seconds are counted while they are decoded, whatever the header says."""
    minutes = wav(bytes(1000 * 60 * 3), rate=1000, width=8, size=100 << 10)
    assert await refusal(front, part(minutes)) == ("audio_too_long", "messages[0]")
    assert front.store.held_bytes == 0
