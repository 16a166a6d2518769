"""The store against a model of it: what is held stays readable, and bytes stay within their limits."""

from __future__ import annotations

import fcntl
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmstack_media.memory import SealedMemory
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.store import DESCRIPTOR_SHARE, Counted, Entry, MediaStore
from llmstack_types import ServerOverloadedError
from llmstack_types.media import memory_name

CACHE_BYTES, HELD_BYTES = 100, 150


def layout_of(num_bytes: int) -> ImageLayout:
    return ImageLayout((num_bytes,), (1,), 1, 1)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MediaStore(CACHE_BYTES, HELD_BYTES)
        self.held: list[Entry] = []

    @rule(tenant=st.sampled_from("ab"), name=st.integers(0, 9), num_bytes=st.integers(1, 60))
    def add(self, tenant: str, name: int, num_bytes: int) -> None:
        before = self.store.held_bytes
        try:
            self.store.reserve(num_bytes)
        except ServerOverloadedError:
            assert before + num_bytes > HELD_BYTES
            return
        assert before + num_bytes <= HELD_BYTES
        memory = SealedMemory.of(bytes([name]) * num_bytes)
        self.held.append(self.store.add((tenant, bytes([name])), layout_of(num_bytes), memory))

    @rule(num_bytes=st.integers(1, 60))
    def fail(self, num_bytes: int) -> None:
        try:
            self.store.reserve(num_bytes)
        except ServerOverloadedError:
            return
        self.store.cancel(num_bytes)

    @rule(tenant=st.sampled_from("abc"), name=st.integers(0, 9))
    def acquire(self, tenant: str, name: int) -> None:
        entry = self.store.acquire((tenant, bytes([name])))
        if entry is not None:
            assert entry.key == (tenant, bytes([name]))
            self.held.append(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.store.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def what_is_held_is_readable(self) -> None:
        for entry in self.held:
            with open(entry.memory.path, "rb") as file:
                assert file.read() == entry.key[1] * entry.memory.num_bytes

    @invariant()
    def bytes_are_counted_and_bounded(self) -> None:
        held = sum(entry.memory.num_bytes for entry in set(self.held))
        assert self.store.held_bytes == held
        assert self.store.num_bytes <= max(CACHE_BYTES, held)

    def teardown(self) -> None:
        for entry in self.held:
            self.store.release(entry)
        assert self.store.held_bytes == 0
        self.store.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_one_is_forgotten_and_its_memory_freed() -> None:
    store = MediaStore(100, 100)
    paths = {}
    for name in (b"1", b"2", b"3"):
        store.reserve(40)
        entry = store.add(("", name), layout_of(40), SealedMemory.of(bytes(40)))
        paths[name] = os.readlink(entry.memory.path)
        store.release(entry)
        if name == b"2":
            first = store.acquire(("", b"1"))
            assert first is not None
            store.release(first)
    assert [store.acquire(("", name)) is not None for name in (b"1", b"2", b"3")] == [True, False, True]
    assert (store.num_queries, store.num_hits) == (4, 3)


def test_entries_take_a_share_of_the_descriptors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (4 * DESCRIPTOR_SHARE, 4096))
    store = MediaStore(10_000, 10_000)
    entries = []
    for number in range(9):
        store.reserve(1)
        entry = store.add(("", bytes([number])), layout_of(1), SealedMemory.of(b"x"))
        entries.append(entry)
        if number != 2:
            store.release(entry)
        assert len(store) <= 4
    held = store.acquire(("", bytes([2])))
    assert held is entries[2]
    for number in range(10, 13):
        store.reserve(1)
        store.add(("", bytes([number])), layout_of(1), SealedMemory.of(b"x"))
    with pytest.raises(ServerOverloadedError):
        store.reserve(1)


def test_names_belong_to_their_tenant() -> None:
    store = MediaStore(100, 100)
    store.set_alias("a", "photo", b"digest")
    store.remember(("a", b"digest"), Counted(layout_of(1), 1))
    assert store.find_alias("a", "photo") == b"digest"
    assert store.find_alias("b", "photo") is None
    assert store.counted(("b", b"digest")) is None


def test_sealed_memory_cannot_change_also_for_one_that_has_it_open() -> None:
    memory = SealedMemory(10)
    writer = os.open(memory.path, os.O_RDWR)
    assert os.pwrite(writer, b"before", 0) == 6
    with pytest.raises(OSError):
        os.ftruncate(writer, 20)
    memory.seal()
    with pytest.raises(OSError):
        os.pwrite(writer, b"behind", 0)
    with pytest.raises(OSError):
        os.ftruncate(writer, 5)
    with pytest.raises(OSError):
        fcntl.fcntl(writer, 1033, 0)
    assert os.pread(writer, 10, 0) == b"before\0\0\0\0"
    os.close(writer)
    memory.close()
    memory.close()


def test_its_name_says_what_it_is() -> None:
    memory = SealedMemory(10, memory_name(b"\xab\x12"))
    assert os.readlink(memory.path) == "/memfd:llmstack-media-ab12 (deleted)"
    memory.close()
