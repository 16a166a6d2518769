"""The store of responses: what it keeps, what it evicts, and what running ones may take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.responses.store import ResponseStore, StoredItem, StoredResponse, decode, encode, events_of
from llmstack_server.state.stream_record import FailedError
from llmstack_types import ServerOverloadedError


def item(name: str, size: int = 10) -> StoredItem:
    return encode({"id": name, "text": "x" * size})


def response(name: str, *, size: int = 100, **fields: Any) -> StoredResponse:
    owner, input_items = fields.pop("owner", ""), fields.pop("input_items", ())
    return StoredResponse(name, owner, input_items, data=b"x" * size, **fields)


def test_the_one_that_ended_first_goes_first():
    store = ResponseStore(2, 10_000)
    for name in ("a", "b"):
        store.put(response(name))
    assert store.get("a", "") is not None
    store.put(response("c"))
    assert [store.get(name, "") is not None for name in "abc"] == [False, True, True]
    assert len(store) == 2


def test_bytes_bound_it_too_and_one_that_is_too_large_is_not_kept():
    store = ResponseStore(100, 250)
    for name in ("a", "b", "c"):
        store.put(response(name))
    assert [store.get(name, "") is not None for name in "abc"] == [False, True, True]
    store.put(response("d", size=251))
    assert store.get("d", "") is None
    assert store.num_bytes <= 250


def test_a_store_of_none_keeps_nothing():
    store = ResponseStore(0, 1000)
    assert not store.is_enabled
    store.put(response("a"))
    assert store.get("a", "") is None


def test_items_are_found_as_long_as_a_response_has_them():
    store = ResponseStore(10, 10_000)
    shared = item("msg_1")
    store.put(response("a", output_items=(shared,)))
    store.put(response("b", input_items=(shared, item("msg_2"))))
    assert store.find_item("msg_2", "") == decode(item("msg_2"))
    store.remove("a")
    assert store.find_item("msg_1", "") == decode(shared)
    store.remove("b")
    assert store.find_item("msg_1", "") is None
    assert store.find_item("msg_2", "") is None


def test_an_item_is_not_replaced_by_sending_its_id():
    store = ResponseStore(10, 10_000)
    store.put(response("a", output_items=(item("msg_1", 10),)))
    store.put(response("b", input_items=(item("msg_1", 99),)))
    assert store.find_item("msg_1", "") == decode(item("msg_1", 10))
    store.remove("b")
    assert store.find_item("msg_1", "") == decode(item("msg_1", 10))


def test_running_ones_are_never_evicted_and_refused_where_they_leave_no_room():
    store = ResponseStore(2, 10_000)
    running = [response(name, is_running=True) for name in "ab"]
    for entry in running:
        store.put(entry)
    store.put(response("c"))
    assert store.get("c", "") is None
    with pytest.raises(ServerOverloadedError):
        store.put(response("d", is_running=True))
    store.complete(running[0], b"done", (item("msg_1"),))
    assert store.find_item("msg_1", "") is not None
    store.put(response("d", is_running=True))
    assert store.get("a", "") is None


def test_events_count_while_they_come_and_end_a_response_that_finds_no_more_room():
    store = ResponseStore(10, 1000)
    store.put(response("a"))
    running = response("b", is_running=True, events=events_of("b", ""))
    store.put(running)
    for _ in range(9):
        assert running.events is not None
        running.events.put(b"x" * 100)
        store.grow(running, 100)
    assert store.get("a", "") is None
    assert store.num_bytes == 1000
    running.events.put(b"x")
    with pytest.raises(ServerOverloadedError):
        store.grow(running, 1)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_that_was_removed_while_running_stays_removed():
    store = ResponseStore(10, 1000)
    running = response("a", is_running=True)
    store.put(running)
    store.remove("a")
    store.grow(running, 10)
    store.complete(running, b"done", (item("msg_1"),))
    assert (len(store), store.num_bytes, store.find_item("msg_1", "")) == (0, 0, None)
    assert running.data == b"done"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 400), st.booleans()), max_size=60))
def test_it_never_holds_more_than_it_may_and_counts_what_it_holds(steps: list[tuple[str, int, bool]]):
    store = ResponseStore(4, 1000)
    held: dict[str, StoredResponse] = {}
    for name, size, is_removal in steps:
        if is_removal:
            store.remove(name)
        elif store.get(name, "") is None:
            held[name] = response(name, size=size, output_items=(item(f"msg_{name}", 1),))
            store.put(held[name])
        assert len(store) <= 4
        assert store.num_bytes <= 1000
        assert store.num_bytes == sum(entry.measure() for entry in held.values() if store.get(entry.id, "") is entry)
    for name in "abcdefgh":
        assert (store.find_item(f"msg_{name}", "") is None) == (store.get(name, "") is None)
        store.remove(name)
    assert store.num_bytes == 0


def test_running_responses_of_one_key_leave_half_of_the_store_to_others():
    store = ResponseStore(4, 10_000, has_several_owners=True)
    for name in "ab":
        store.put(response(name, owner="one", is_running=True))
    with pytest.raises(ServerOverloadedError):
        store.put(response("c", owner="one", is_running=True))
    for name in "de":
        store.put(response(name, owner="two", is_running=True))
    assert [store.get("a", "one") is not None, store.get("e", "two") is not None, len(store)] == [True, True, 4]


def test_responses_expire_so_long_after_their_end():
    now_s = 100.0
    store = ResponseStore(10, 10_000, max_age_s=60, clock=lambda: now_s)
    store.put(response("old", ended_s=30.0))
    store.put(response("a"))
    running = response("b", is_running=True)
    store.put(running)
    store.expire()
    assert [store.get(name, "") is not None for name in ("a", "b", "old")] == [True, True, False]
    now_s = 161.0
    store.complete(running, b"", ())
    store.expire()
    assert [store.get(name, "") is not None for name in ("a", "b")] == [False, True]


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 400)), max_size=60))
def test_an_owner_within_its_share_loses_nothing_to_others(steps: list[tuple[str, int]]):
    max_responses, max_bytes = 9, 1500
    store = ResponseStore(max_responses, max_bytes)
    kept: dict[str, list[int]] = {owner: [] for owner in "ABC"}
    for number, (owner, size) in enumerate(steps):
        store.put(response(str(number), owner=owner, size=size))
        kept[owner].append(number)
        for other, numbers in kept.items():
            sizes = [steps[one][1] for one in numbers]
            if len(sizes) <= max_responses // 3 and sum(sizes) <= max_bytes // 3:
                assert all(store.get(str(one), other) is not None for one in numbers)
        for other, numbers in kept.items():
            kept[other] = [one for one in numbers if store.get(str(one), other) is not None]


async def test_a_reader_whose_server_ends_goes_on_after_the_last_event_that_it_has_seen():
    log = events_of("a", "")
    log.hold()
    for event in (b"0", b"1", b"2"):
        log.put(event)
    log.reveal(2)  # the third one is not on the disk yet
    log.fail({"message": "ended"})
    reader = log.open(0)
    batch = await reader.read()
    assert (batch.parts, batch.is_last) == ([b"0", b"1"], False)
    with pytest.raises(FailedError, match="ended"):
        await reader.read()
    assert reader.position == 2
