"""Sums over the pictures of requests: of one request, of a key, of all; and what a refused request fetches."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from media_helpers.net import OPEN, Net, answer
from media_helpers.pictures import as_file, noise
from PIL import Image

from llmstack_media import MediaLimits
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.front import MediaFront, OpenedMedia
from llmstack_media.parts import MediaPart, Part
from llmstack_types import InvalidRequestError, ServerOverloadedError

FILES: dict[str, Any] = {"preprocessor": {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 3136}}
PICTURE = as_file(Image.fromarray(noise(np.random.default_rng(0), 60, 40)))
SIZE = len(PICTURE)
LIMITS = MediaLimits(max_request_bytes=3 * SIZE + SIZE // 2, max_source_bytes=8 * SIZE)


def at(name: str, index: int = 0, **fields: Any) -> MediaPart:
    return MediaPart(f"http://{name}.example/", param=f"content[{index}]", **fields)


def inline(data: bytes, index: int = 0) -> MediaPart:
    return MediaPart("data:image/png;base64," + base64.b64encode(data).decode(), param=f"content[{index}]")


@pytest.fixture
def net() -> Net:
    net = Net()
    for index in range(9):
        net.answers[f"host{index}.example/"] = answer(PICTURE)
    net.answers["endless.example/"] = b"HTTP/1.1 200 OK\r\n\r\n" + PICTURE * 9
    net.answers["pieces.example/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (4 * SIZE)
    net.answers["announced.example/"] = answer(b"", length=4 * SIZE)
    return net


@pytest.fixture
async def front(net: Net) -> AsyncIterator[MediaFront]:
    policy = FetchPolicy(domains=OPEN.domains, timeout_s=20.0)
    front = MediaFront(FILES, net.fetcher(policy), limits=LIMITS)
    yield front
    assert front._sources.held == 0
    await front.shutdown()


async def refusal(work: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await work
    return caught.value


@pytest.mark.parametrize("name", ["endless", "pieces", "announced"])
async def test_the_pictures_of_one_request_have_a_sum(front: MediaFront, name: str) -> None:
    opened = await front.open_all([at(f"host{index}", index) for index in range(3)])
    assert [one.layout.num_vectors for one in opened] == [opened[0].layout.num_vectors] * 3
    assert front._sources.held == 3 * SIZE
    del opened
    error = await refusal(front.open_all([at(name, 0)]))
    assert (error.param, error.code) == ("content[0]", "image_too_large")
    assert str(LIMITS.max_request_bytes) in error.message
    error = await refusal(front.open_all([at(f"host{index}", index) for index in range(4)]))
    assert error.code == "image_too_large"


async def test_bytes_are_given_back_when_they_are_decoded_or_forgotten(front: MediaFront) -> None:
    opened = await front.open_all([at("host0"), inline(PICTURE, 1)])
    assert 2 * SIZE <= front._sources.held <= 2 * SIZE + 32  # of base64, what it may have at most
    (await opened[0].prepare()).release()
    assert front._sources.held < 2 * SIZE
    del opened
    assert front._sources.held == 0


async def test_the_requests_of_a_key_leave_as_much_for_others(front: MediaFront) -> None:
    held = [await front.open_all([at(f"host{index}") for index in range(2)], "a") for _ in range(2)]
    with pytest.raises(ServerOverloadedError):
        await front.open_all([at("host0")], "a")
    other = await front.open_all([at("host0"), at("host1")], "b")
    assert front._sources.held == 6 * SIZE
    del held, other


@pytest.mark.parametrize("bad", [
    inline(b"no picture"), at("host1", detail="ultra"), MediaPart(uuid="unknown"), at("host1", uuid="x" * 300),
    MediaPart("ftp://a.example/"), MediaPart("file:///a"),
    inline(b"\x89PNG\r\n\x1a\n" + bytes(4 * SIZE)),
])  # fmt: skip
async def test_a_request_with_a_part_that_is_refused_fetches_nothing(front: MediaFront, net: Net, bad: Any) -> None:
    await refusal(front.open_all([at("host0"), bad, at("host1")]))
    assert not net.resolved


async def test_a_picture_that_fails_ends_the_fetches_beside_it(front: MediaFront, net: Net) -> None:
    net.answers["host8.example/"] = answer(b"", "404 Not Found")
    net.answers["slow.example/"] = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    net.is_open = True  # the slow one never ends
    async with asyncio.timeout(10):
        error = await refusal(front.open_all([at("slow", 0), at("host8", 1)]))
    assert (error.param, error.code) == ("content[1]", "media_fetch_failed")
    assert all(one.is_aborted for one in net.transports)


async def test_what_counts_the_pictures_ends_a_request_by_their_headers(front: MediaFront, net: Net) -> None:
    counted: list[str] = []

    def count(part: Part, opened: OpenedMedia) -> None:
        assert opened.layout.num_vectors > 0
        counted.append(part.param)
        if len(counted) == 2:
            raise InvalidRequestError("It is enough.", param=part.param, code="context_length_exceeded")

    net.answers["slow.example/"] = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    net.is_open = True  # the slow one never ends
    async with asyncio.timeout(10):
        await refusal(front.open_all([at("slow", 3), inline(PICTURE, 0), inline(PICTURE, 1)], on_counted=count))
    assert (counted, net.resolved) == (["content[0]", "content[1]"], [])
    counted.clear()
    async with asyncio.timeout(10):
        error = await refusal(front.open_all([at("slow", 3), inline(PICTURE, 0), at("host1", 1)], on_counted=count))
    assert (error.param, counted) == ("content[1]", ["content[0]", "content[1]"])
    assert front.stats.num_queries == 0, "nothing is asked of the store, so nothing is decoded"


async def test_prompts_of_one_request_have_one_sum(front: MediaFront) -> None:
    request = front.of_request("a")
    held = [await front.open_all([at(f"host{index}")], "a", request=request) for index in range(3)]
    error = await refusal(front.open_all([at("host3")], "a", request=request))
    assert error.code == "image_too_large"
    del held
