"""Media of requests, with real child processes: counted without a decode, decoded once, refused by name."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_helpers.pictures import as_file, bomb, noise
from PIL import Image

from llmstack_media import MediaLimits, decode_image, image_processor
from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.front import MediaFront, OpenedMedia, PreparedMedia
from llmstack_media.parts import MediaPart, digest_of
from llmstack_types import InvalidRequestError, ServerOverloadedError

FILES: dict[str, Any] = {
    "preprocessor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 32},
    },
    "processor": {"image_seq_len": 4},
    "model": {"vision_config": {"patch_size": 8}},
}
PICTURES = [as_file(Image.fromarray(noise(np.random.default_rng(number), 60, 40))) for number in range(4)]
FETCHER = Fetcher(FetchPolicy())


def part(data: bytes, **fields: Any) -> MediaPart:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return MediaPart(url, param="messages[0].content[1]", **fields)


@pytest.fixture
async def front() -> AsyncIterator[MediaFront]:
    front = MediaFront(FILES, FETCHER)
    yield front
    await front.shutdown()


async def refusal(work: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await work
    assert caught.value.param == "messages[0].content[1]"
    return caught.value


def content(prepared: PreparedMedia) -> np.ndarray:
    memory = prepared.item(0, 1).memory
    assert memory is not None
    array = np.fromfile(memory.path, dtype=np.uint8)
    assert array.nbytes == memory.num_bytes
    return array


def pool_pid(front: MediaFront) -> int | None:
    process = front._pool._pool.process
    return None if process is None else process.pid


async def children(front: MediaFront) -> list[int]:
    pid = pool_pid(front)
    text = await asyncio.to_thread(Path(f"/proc/{pid}/task/{pid}/children").read_text)
    return [int(child) for child in text.split()]


async def test_a_picture_becomes_what_the_processor_makes_of_it(front: MediaFront) -> None:
    opened = await front.open(part(PICTURES[0]))
    processor = image_processor(**FILES)
    assert opened.layout == processor.layout(60, 40)
    assert opened.pieces == processor.placeholders(opened.layout)
    prepared = await opened.prepare()
    item = prepared.item(5, 40, ((1, 4),))
    assert (item.digest, item.kind, item.offset, item.num_tokens) == (opened.digest, "image", 5, 40)
    assert (item.layout, item.num_units) == (opened.layout.grid, opened.layout.num_units)
    expected = processor.prepare(decode_image(PICTURES[0], MediaLimits()))
    np.testing.assert_array_equal(content(prepared), expected.reshape(-1))
    prepared.release()
    prepared.release()
    with pytest.raises(ValueError, match="released"):
        prepared.item(0, 1)


async def test_the_process_starts_before_the_first_picture_which_finds_it(front: MediaFront) -> None:
    await front.start()
    process = front._pool._pool.process
    assert process is not None
    (await (await front.open(part(PICTURES[0]))).prepare()).release()
    assert front._pool._pool.process is process
    await front.shutdown()
    await front.start()  # as where a server ends while it starts


async def test_the_memory_is_named_by_the_digest(front: MediaFront) -> None:
    opened = await front.open(part(PICTURES[0]))
    prepared = await opened.prepare()
    memory = prepared.item(0, 1).memory
    assert memory is not None
    assert opened.digest.hex() in await asyncio.to_thread(os.readlink, memory.path)
    prepared.release()


async def test_many_that_want_one_picture_wait_for_one_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    front = MediaFront(FILES, FETCHER, cache_bytes=0)
    jobs = []
    run = front._pool._pool.run
    monkeypatch.setattr(front._pool._pool, "run", lambda job, **rest: (jobs.append(job["do"]), run(job, **rest))[1])
    try:
        opened = await asyncio.gather(*(front.open(part(PICTURES[0])) for _ in range(6)))
        jobs.clear()
        waiting = [asyncio.create_task(one.prepare()) for one in opened]
        await asyncio.sleep(0)
        waiting[0].cancel()
        prepared = await asyncio.gather(*waiting[1:])
        assert jobs == ["prepare"]
        for one in prepared:
            assert front.store.held_bytes > 0
            content(one)
            one.release()
        assert front.store.num_bytes == front.store.held_bytes == 0
    finally:
        await front.shutdown()


async def test_a_picture_that_is_sent_again_costs_a_hash(front: MediaFront) -> None:
    (await (await front.open(part(PICTURES[0]))).prepare()).release()
    await front._pool.shutdown()  # no child is asked any more
    prepared = await (await front.open(part(PICTURES[0]))).prepare()
    content(prepared)
    prepared.release()
    with pytest.raises(ServerOverloadedError):
        await front.open(part(PICTURES[0]), tenant="another")
    with pytest.raises(ServerOverloadedError):
        await front.open(part(PICTURES[0], detail="low"))


async def test_a_request_that_is_refused_costs_no_decode(front: MediaFront, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    run = front._pool._pool.run
    monkeypatch.setattr(front._pool._pool, "run", lambda job, **rest: (jobs.append(job["do"]), run(job, **rest))[1])
    error = await refusal(front.open(part(as_file(Image.new("1", (8000, 6251))))))
    assert error.code == "image_too_large"
    assert (await refusal(front.open(part(b"<html>")))).code == "unsupported_media_format"
    assert (await refusal(front.open(part(PICTURES[0][:20])))).code == "invalid_image"
    assert set(jobs) == {"header"}
    jobs.clear()
    for bad in (
        {"detail": "ultra"},
        {"options": {"longest_edge": 10**6}},
        {"options": {"unknown": 1}},
        {"options": {"do_image_splitting": "yes"}},
        {"options": {"longest_edge": -1}},
        {"uuid": "x" * 300},
    ):
        options = bad.pop("options", {})
        assert (await refusal(front.open(part(PICTURES[0], **bad), options=options))).code == "invalid_value"
    assert not jobs


async def test_a_damaged_picture_with_a_good_header_is_refused_when_it_is_decoded(front: MediaFront) -> None:
    opened = await front.open(part(PICTURES[0][: len(PICTURES[0]) // 2]))
    assert (await refusal(opened.prepare())).code == "invalid_image"
    assert front.store.held_bytes == front.store.num_bytes == 0


async def test_options_and_detail_change_layout_and_digest(front: MediaFront) -> None:
    asked = [(part(PICTURES[0]), {}), (part(PICTURES[0], detail="low"), {}),
             (part(PICTURES[0]), {"longest_edge": 64}), (part(PICTURES[1]), {})]  # fmt: skip
    opened = [await front.open(one, "", options) for one, options in asked]
    assert len({one.digest for one in opened}) == 4
    assert [one.layout.grid[0] for one in opened[:3]] == [13, 1, 5]
    for one in opened:
        prepared = await one.prepare()
        assert content(prepared).nbytes == one.layout.num_bytes
        prepared.release()
    same = await front.open(part(PICTURES[0], detail="high"), options={"do_image_splitting": True})
    assert same.digest == opened[0].digest, "options that are in effect anyway"


async def test_what_is_done_is_counted(front: MediaFront) -> None:
    for data in (PICTURES[0], PICTURES[0], PICTURES[1]):
        (await (await front.open(part(data))).prepare()).release()
    await refusal(front.open(part(b"<html>")))
    await refusal(front.open(MediaPart("http://a.example/", param="messages[0].content[1]")))
    await refusal((await front.open(part(PICTURES[2][: len(PICTURES[2]) // 2]))).prepare())
    stats = front.stats
    assert (stats.num_queries, stats.num_hits) == (4, 1)
    assert stats.num_bytes == 2 * len(PICTURES[0]) + len(PICTURES[1]) + len(b"<html>") + len(PICTURES[2]) // 2
    assert stats.fetch_results == {"ok": 5, "media_url_not_allowed": 1}
    assert stats.failures == {"unsupported_media_format": 1, "invalid_image": 1}
    assert stats.decode_s > 0


async def test_bytes_are_what_their_url_would_be(front: MediaFront) -> None:
    by_bytes = await front.open(MediaPart(), content=PICTURES[0])
    assert by_bytes.digest == (await front.open(part(PICTURES[0]))).digest
    small = MediaFront(FILES, FETCHER, limits=MediaLimits(max_bytes=len(PICTURES[0]) - 1))
    assert (await refusal(small.open(part(b""), content=PICTURES[0]))).code == "image_too_large"
    await small.shutdown()


async def test_a_uuid_is_a_name_of_its_own_key(front: MediaFront) -> None:
    named = MediaPart(uuid="photo", param="messages[0].content[1]")
    assert (await refusal(front.open(named, "a"))).code == "media_not_found"
    first = await front.open(part(PICTURES[0], uuid="photo"), "a")
    prepared = await first.prepare()
    again = await front.open(named, "a")
    assert again.digest == first.digest
    second = await again.prepare()
    np.testing.assert_array_equal(content(prepared), content(second))
    assert (await refusal(front.open(named, "b"))).code == "media_not_found"
    replaced = await front.open(part(PICTURES[1], uuid="photo"), "a")
    assert replaced.digest != first.digest, "with content, the content decides"
    assert (await front.open(named, "a")).digest == replaced.digest
    prepared.release()
    second.release()


async def test_a_uuid_of_a_picture_that_is_forgotten_is_not_found() -> None:
    front = MediaFront(FILES, FETCHER, cache_bytes=0)
    try:
        (await (await front.open(part(PICTURES[0], uuid="photo"))).prepare()).release()
        opened = await front.open(MediaPart(uuid="photo", param="messages[0].content[1]"))
        assert (await refusal(opened.prepare())).code == "media_not_found"
    finally:
        await front.shutdown()


async def test_requests_hold_no_more_than_their_bytes() -> None:
    size = image_processor(**FILES).layout(60, 40).num_bytes
    front = MediaFront(FILES, FETCHER, max_held_bytes=size)
    try:
        prepared = await (await front.open(part(PICTURES[0]))).prepare()
        waiting = await front.open(part(PICTURES[1]))
        with pytest.raises(ServerOverloadedError):
            await waiting.prepare()
        prepared.release()
        (await waiting.prepare()).release()
    finally:
        await front.shutdown()


async def test_a_child_that_is_killed_ends_its_own_picture(front: MediaFront) -> None:
    """A picture at whose decode the child is stopped, then killed; another one goes on beside it."""
    opened = [await front.open(part(one)) for one in PICTURES[:2]]
    large = await front.open(part(bomb(7000, 7000)))
    dying = asyncio.create_task(large.prepare())
    pid = pool_pid(front)
    async with asyncio.timeout(60):
        while len(await children(front)) < 2:  # noqa: ASYNC110 - no event says that another process has forked
            await asyncio.sleep(0.005)
    youngest = (await children(front))[-1]
    os.kill(youngest, signal.SIGKILL)
    assert (await refusal(dying)).code == "invalid_image"
    for one in opened:
        (await one.prepare()).release()
    assert pool_pid(front) == pid
    assert front.store.held_bytes == 0


async def test_a_child_has_no_socket_but_its_link(front: MediaFront) -> None:
    await front.open(part(PICTURES[0]))
    (child,) = await children(front)
    links = [os.readlink(entry) for entry in await asyncio.to_thread(lambda: [*Path(f"/proc/{child}/fd").iterdir()])]
    assert sum(link.startswith("socket:") for link in links) == 1
    assert not any("memfd" in link for link in links), "nor a picture of an earlier job"


async def test_a_picture_that_takes_too_long_is_refused() -> None:
    front = MediaFront(FILES, FETCHER, limits=MediaLimits(decode_s=0.02))
    try:
        opened = await front.open(part(bomb(7000, 7000)))
        for _ in range(50):
            try:
                assert (await refusal(opened.prepare())).code == "image_too_large"
                break
            except ServerOverloadedError:  # a busy machine gave the child too little of its time
                continue
        else:
            pytest.skip("this machine is too busy")
        assert front.store.held_bytes == 0
    finally:
        await front.shutdown()


async def test_the_front_imports_no_torch_and_answers_after_the_pool_was_killed(front: MediaFront) -> None:
    opened: list[OpenedMedia] = [await front.open(part(one)) for one in PICTURES]
    pid = pool_pid(front)
    assert pid is not None
    maps = await asyncio.to_thread(Path(f"/proc/{pid}/maps").read_text)
    assert "libtorch" not in maps
    os.kill(pid, signal.SIGKILL)
    for one in opened:
        (await one.prepare()).release()
    assert pool_pid(front) != pid


def test_digests_have_the_length_of_each_part() -> None:
    digests = [
        digest_of((("a", "bc"),), b"d"), digest_of((("ab", "c"),), b"d"), digest_of((("a", "b"),), b"cd"),
        digest_of((("a", "bc"), ("", "")), b"d"), digest_of((), b"abcd"),
    ]  # fmt: skip
    assert len({*digests}) == 5
    assert {len(one) for one in digests} == {32}
