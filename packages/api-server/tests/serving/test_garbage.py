"""Full collections wait until no request is in flight, but not for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from llmstack_server.serving import garbage
from llmstack_server.serving.garbage import MAX_WAIT_S, NEVER, IdleCollections


class Node:
    """One that refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "MIN_MIDDLE_COLLECTIONS", 1)
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def old_garbage() -> weakref.ref[Node]:
    node = Node()
    gc.collect(1)  # it survives
    found = weakref.ref(node)
    del node
    gc.collect(1)
    return found


def test_it_collects_when_nothing_is_in_flight_and_after_a_minute_at_the_latest():
    num_in_flight, now_s = 1, 100.0
    collections = IdleCollections(lambda: num_in_flight, lambda: now_s)
    collections.begin()
    assert gc.get_threshold()[2] == NEVER
    found = old_garbage()
    collections.tick()
    assert found() is not None
    num_in_flight = 0
    collections.tick()
    assert found() is None
    num_in_flight, found = 1, old_garbage()
    collections.tick()
    assert found() is not None
    now_s += MAX_WAIT_S
    collections.tick()
    assert found() is None


def test_what_the_start_has_made_is_left_alone_and_its_garbage_is_gone():
    node = Node()
    found = weakref.ref(node)
    del node
    num_frozen = gc.get_freeze_count()
    garbage.freeze_start()
    assert found() is None
    assert gc.get_freeze_count() > num_frozen
