"""The store against a model of it: what is held stays readable, and bytes stay within their limits."""

from __future__ import annotations

import fcntl
import os
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmstack_media.memory import SealedMemory
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.store import DESCRIPTOR_SHARE, MAX_KNOWN, Counted, Entry, MediaStore
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

    @rule(tenant=st.sampled_from(["a", "b", ""]), name=st.integers(0, 9), num_bytes=st.integers(1, 60))
    def add(self, tenant: str, name: int, num_bytes: int) -> None:
        if not self.reserve(tenant, num_bytes):
            return
        memory = SealedMemory.of(bytes([name]) * num_bytes)
        self.held.append(self.store.add((tenant, bytes([name])), layout_of(num_bytes), memory))

    @rule(tenant=st.sampled_from(["a", "b", ""]), num_bytes=st.integers(1, 60))
    def fail(self, tenant: str, num_bytes: int) -> None:
        if self.reserve(tenant, num_bytes):
            self.store.cancel(tenant, num_bytes)

    def reserve(self, tenant: str, num_bytes: int) -> bool:
        """Whether bytes are set aside: what requests use is limited, of all and of one tenant. Room for them comes from
        the tenant that keeps most.
        """
        left = HELD_BYTES - self.store.held_bytes - num_bytes
        own = sum(entry.memory.num_bytes for entry in set(self.held) if entry.key[0] == tenant)
        kept = Counter({key[0]: 0 for key in self.store._entries})
        kept.update({one: self.store._bytes_of[one] for one in kept})
        before = dict(self.store._entries)
        try:
            self.store.reserve(tenant, num_bytes)
        except ServerOverloadedError:
            assert left < (own + num_bytes if tenant else 0)
            return False
        assert left >= 0 or not self.held
        assert left >= own + num_bytes or not own or not tenant
        for key in before.keys() - self.store._entries.keys():
            may_yield = {entry.key[0] for entry in self.store._entries.values() if not entry.num_references}
            assert all(kept[key[0]] >= self.store._bytes_of[other] for other in may_yield), "the one with most yields"
        return True

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
        store.reserve("", 40)
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
        store.reserve("", 1)
        entry = store.add(("", bytes([number])), layout_of(1), SealedMemory.of(b"x"))
        entries.append(entry)
        if number != 2:
            store.release(entry)
        assert len(store) <= 4
    held = store.acquire(("", bytes([2])))
    assert held is entries[2]
    for number in range(10, 13):
        store.reserve("", 1)
        store.add(("", bytes([number])), layout_of(1), SealedMemory.of(b"x"))
    with pytest.raises(ServerOverloadedError):
        store.reserve("", 1)


def test_the_flood_of_one_key_leaves_the_pictures_and_names_of_another() -> None:
    store = MediaStore(100, 100)
    for tenant, name in [("a", b"photo"), *(("b", bytes([number, 0])) for number in range(40))]:
        store.reserve(tenant, 20)
        store.release(store.add((tenant, name), layout_of(20), SealedMemory.of(bytes(20))))
        store.remember((tenant, name), Counted(layout_of(20), 1))
    store.set_alias("a", "photo", b"photo")
    for number in range(MAX_KNOWN + 9):
        store.set_alias("b", str(number), b"x")
        store.remember(("b", number.to_bytes(4, "big")), Counted(layout_of(1), 1))
    assert store.find_alias("a", "photo") == b"photo"
    assert store.find_alias("b", "0") is None
    assert store.counted(("a", b"photo")) is not None
    assert store.acquire(("a", b"photo")) is not None
    assert store.acquire(("b", bytes([35, 0]))) is None
    assert store.acquire(("b", bytes([36, 0]))) is not None


def test_a_key_that_holds_much_leaves_memory_and_places_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (8 * DESCRIPTOR_SHARE, 4096))
    for num_bytes in (25, 1):
        store = MediaStore(0, 100 if num_bytes == 25 else 10_000)
        for number in range(2 if num_bytes == 25 else 4):
            store.reserve("a", num_bytes)
            store.add(("a", bytes([number])), layout_of(num_bytes), SealedMemory.of(bytes(num_bytes)))
        with pytest.raises(ServerOverloadedError):
            store.reserve("a", num_bytes)
        store.reserve("b", num_bytes)


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
