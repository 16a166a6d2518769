"""Videos of requests, with real child processes: counted without a decode, and apart from pictures of the same file."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from media_helpers.pictures import as_file, noise
from PIL import Image

from llmstack_media.decode.clips import decode_frames, read_clip
from llmstack_media.fetch.data_urls import decode_data_url
from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.front import MediaFront
from llmstack_media.limits import MediaLimits
from llmstack_media.parts import MediaPart
from llmstack_types import InvalidRequestError

FILES: dict[str, Any] = {
    "preprocessor": {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 28 * 28 * 100},
    "model": {"model_type": "qwen2_vl"},
}
FRAMES = [Image.fromarray(noise(np.random.default_rng(number), 60, 60)) for number in range(4)]


@pytest.fixture
async def front() -> AsyncIterator[MediaFront]:
    front = MediaFront(FILES, Fetcher(FetchPolicy()), video_options={"num_frames": 4})
    yield front
    await front.shutdown()


def animation() -> bytes:
    buffer = io.BytesIO()
    FRAMES[0].save(buffer, "GIF", save_all=True, append_images=FRAMES[1:], duration=100)
    return buffer.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(kind: Any, data: bytes = animation(), **fields: Any) -> MediaPart:
    return MediaPart(f"data:image/gif;base64,{base64_of(data)}", param="messages[0]", kind=kind, **fields)


async def test_a_video_and_a_picture_of_one_file_are_two_items(front: MediaFront) -> None:
    video, image, same = await front.open_all([part("video", uuid="clip"), part("image"), part("video")])
    (again,) = await front.open_all([MediaPart(kind="video", uuid="clip")])
    assert front._pool.processor_s < 1
    assert len(front.store) == 0  # nothing is decoded
    assert (video.layout.grid, image.layout.grid) == ((2, 4, 4), (1, 4, 4))
    assert len({video.digest, again.digest, same.digest}) == 1
    assert image.digest != video.digest
    (fewer,) = await front.open_all([part("video")], options={"num_frames": 2})
    assert (fewer.layout.grid, fewer.digest != video.digest) == ((1, 4, 4), True)
    prepared = await video.prepare()
    item = prepared.item(3, 8)
    assert (item.kind, item.layout, item.num_units) == ("video", (2, 4, 4), 32)
    assert item.memory is not None
    limits, processor = MediaLimits(), front.processors.video
    assert processor is not None
    layout = processor.layout(read_clip(animation(), limits))
    expected = processor.prepare(decode_frames(animation(), layout.frames, limits), layout)
    assert np.array_equal(np.fromfile(item.memory.path, dtype=np.uint8), expected.flatten())
    prepared.release()


async def test_options_belong_to_the_kinds_that_have_them(front: MediaFront) -> None:
    await front.open_all([part("image"), part("video")], options={"num_frames": 2, "max_pixels": 28 * 28 * 90})
    for options, name in (({"frames": 2}, "frames"), ({"num_frames": -1}, "num_frames")):
        with pytest.raises(InvalidRequestError, match=name):
            await front.open_all([part("video")], options=options)


async def test_a_model_without_videos_refuses_them() -> None:
    front = MediaFront({**FILES, "model": {"model_type": "llava"}}, Fetcher(FetchPolicy()))
    with pytest.raises(InvalidRequestError, match="takes no such items"):
        await front.open_all([part("video")])
    with pytest.raises(InvalidRequestError, match="no option 'fps'"):
        await front.open_all([part("image")], options={"fps": 2})
    await front.shutdown()


def test_frames_of_a_url_stand_between_commas() -> None:
    files = [as_file(frame) for frame in FRAMES]
    url = "data:video/jpeg;base64," + ",".join(map(base64_of, files))
    data = decode_data_url(url, 1 << 20)
    assert read_clip(data, MediaLimits()) == (4, 0.0, 60, 60)
    for wrong, code in (("AAAA,A", "invalid_image"), (",".join(["AAAA"] * 769), "image_too_large")):
        with pytest.raises(InvalidRequestError) as caught:
            decode_data_url(f"data:video/jpeg;base64,{wrong}", 1 << 20)
        assert caught.value.code == code
    with pytest.raises(InvalidRequestError) as caught:
        decode_data_url(url, sum(map(len, files)) - 1)
    assert caught.value.code == "image_too_large"
