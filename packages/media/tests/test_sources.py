"""Bytes of requests as they came: counted before they are read, and given back whatever becomes of them."""

from __future__ import annotations

import gc
import threading

import pytest

from llmstack_media.sources import SourceBytes
from llmstack_types import InvalidRequestError, ServerOverloadedError


def test_a_request_has_one_sum_also_of_what_it_gave_back() -> None:
    sources = SourceBytes(1000, 100)
    request = sources.of_request("a")
    first = request.hold()
    first.reserve(60)
    first.free()
    first.free()
    second = request.hold()
    with pytest.raises(InvalidRequestError, match="100 bytes") as caught:
        second.reserve(41)
    assert caught.value.code == "image_too_large"
    second.reserve(40)
    assert sources.held == 40
    third = sources.of_request("a").hold()
    third.reserve(100)
    assert sources.held == 140


def test_a_key_leaves_as_much_free_as_it_holds() -> None:
    sources = SourceBytes(100, 100)
    own, other = sources.of_request("a").hold(), sources.of_request("b").hold()
    own.reserve(30)
    own.reserve(20)
    with pytest.raises(ServerOverloadedError):
        own.reserve(1)
    other.reserve(25)
    with pytest.raises(ServerOverloadedError):
        other.reserve(1)
    alone = SourceBytes(100, 200).of_request("").hold()
    for _ in range(10):
        alone.reserve(10)
    with pytest.raises(ServerOverloadedError):
        alone.reserve(1)


def test_what_a_request_forgets_is_given_back_from_any_thread() -> None:
    sources = SourceBytes(1 << 30, 1 << 30)

    def hold_and_forget() -> None:
        for _ in range(500):
            held = sources.of_request("a").hold()
            held.reserve(7)
            held.data = b"x"

    threads = [threading.Thread(target=hold_and_forget) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cycle = [sources.of_request("b").hold()]
    cycle[0].reserve(5)
    cycle.append(cycle)  # type: ignore[arg-type]  # the collector ends it
    assert sources.held == 5
    del cycle
    gc.collect()
    assert sources.held == 0
