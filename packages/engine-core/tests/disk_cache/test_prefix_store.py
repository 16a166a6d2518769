"""Prefixes on disk: what was written for the same tokens in the same scope, or a miss."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core.disk_cache.block_files import BlockFiles, BlockMissError
from llmstack_engine_core.disk_cache.file_groups import ONE_GROUP, Extent, FileGroups
from llmstack_engine_core.disk_cache.prefix_store import MAX_EXTENT_BLOCKS, PrefixStore
from llmstack_engine_core.disk_cache.scopes import Scope
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_types import EngineCoreRequest, EngineReady, SamplingParams

BLOCK_SIZE, BLOCK_BYTES, STATE_BYTES = 4, 24, 10
READY = EngineReady(64, BLOCK_SIZE, 64, 97, "float32", "cpu", numeric_contract_id="c0", kv_cache_dtype="float32")
REQUEST = EngineCoreRequest("r", [1], SamplingParams(), cache_salt="tenant-a:", lora_name="mine@d1.1")
SECRET = bytes(32)
TEXT = list(range(1, 50))


class Disk:
    """A store in a folder, as an engine core has it."""

    def __init__(
        self,
        path: Path,
        *,
        has_states: bool = False,
        secret: bytes = SECRET,
        groups: FileGroups = ONE_GROUP,
        **ready: Any,
    ) -> None:
        self.path, self._groups = path, groups
        self._secret, self._tags = secret, TagMaker(replace(READY, **ready), BLOCK_BYTES, STATE_BYTES * has_states)
        self._open()

    def _open(self) -> None:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.files = BlockFiles(folder, os.dup(folder), 1 << 20)
        self.store = PrefixStore(self.files, self._secret, self._tags, self._groups)

    def reopen(self) -> None:
        self.close()
        self._open()

    def write(self, token_ids: list[int], request: EngineCoreRequest = REQUEST) -> dict[Extent, bytes]:
        """Writes all extents of a text; the blocks of each."""
        store, chain, written = self.store, self.store.chain(request, token_ids), {}
        for extent in store.extents(0, chain.num_blocks):
            text, start = store.content(chain, extent)
            text[start:] = written[extent] = os.urandom(len(text) - start)
            name = store.name(chain, extent)
            store.files.write(name, chain.scope.seal(name, text), chain.scope.owner)
        if store.has_states:
            text, start = store.state_content(chain)
            text[start:] = os.urandom(STATE_BYTES)
            name = chain.state_name(chain.num_blocks)
            store.files.write(name, chain.scope.seal(name, text), chain.scope.owner)
        return written

    def found(self, token_ids: list[int], request: EngineCoreRequest = REQUEST) -> int:
        chain = self.store.chain(request, token_ids)
        return self.store.find(chain, chain.num_blocks)

    def cause(self, token_ids: list[int], extent: Extent) -> str:
        with pytest.raises(BlockMissError) as caught:
            self.store.read(self.store.chain(REQUEST, token_ids), extent)
        return caught.value.cause

    def close(self) -> None:
        self.files.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.close()


@settings(max_examples=50)
@given(texts=st.lists(st.lists(st.integers(0, 1), max_size=80), max_size=4), sought=st.lists(st.integers(0, 1)))
def test_what_is_found_is_what_was_written(
    texts: list[list[int]], sought: list[int], tmp_path_factory: pytest.TempPathFactory
):
    disk = Disk(tmp_path_factory.mktemp("store"))
    blocks: dict[tuple[int, ...], bytes] = {}
    for text in texts:
        for extent, content in disk.write(text).items():
            blocks[tuple(text[: extent.end * BLOCK_SIZE])] = content
    num_found = disk.found(sought)
    chain = disk.store.chain(REQUEST, sought)
    for extent in disk.store.extents(0, num_found):
        assert disk.store.read(chain, extent) == blocks[tuple(sought[: extent.end * BLOCK_SIZE])]
    longest = max((len(text) for text in blocks if tuple(sought[: len(text)]) == text), default=0)
    assert num_found * BLOCK_SIZE == longest
    disk.close()


def test_any_byte_that_changed_is_a_miss_and_its_file_goes(disk: Disk):
    disk.write(TEXT[:8])
    (path,) = disk.path.iterdir()
    written = path.read_bytes()
    for place in range(len(written)):
        content = bytearray(written)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        disk.reopen()
        assert disk.cause(TEXT[:8], Extent(0, 2)) == "damaged"
        assert not path.exists()
        assert disk.found(TEXT[:8]) == 0


def test_a_file_that_was_cut_or_grew_is_a_miss(disk: Disk):
    disk.write(TEXT[:8])
    (path,) = disk.path.iterdir()
    written = path.read_bytes()
    for num_bytes in {*range(len(written) + 8)} - {len(written)}:
        path.write_bytes((written + bytes(8))[:num_bytes])
        disk.reopen()
        assert disk.cause(TEXT[:8], Extent(0, 2)) == "damaged"


def test_a_block_under_the_name_of_another_is_a_miss(disk: Disk):
    disk.write(TEXT[:32])
    disk.write([7, *TEXT[1:32]])
    chains = [disk.store.chain(REQUEST, text) for text in (TEXT[:32], [7, *TEXT[1:32]])]
    first, other = (disk.path / chain.name(8) for chain in chains)
    first.write_bytes(other.read_bytes())
    assert disk.cause(TEXT[:32], Extent(0, 8)) == "damaged"


def test_equal_names_of_other_tokens_are_a_miss(disk: Disk):
    """The tokens themselves are compared, whatever the names say."""
    chain = disk.store.chain(REQUEST, TEXT[:8])
    text, _ = disk.store.content(disk.store.chain(REQUEST, [9, *TEXT[1:8]]), Extent(0, 2))
    disk.files.write(chain.name(2), chain.scope.seal(chain.name(2), text))
    assert disk.cause(TEXT[:8], Extent(0, 2)) == "foreign"


@pytest.mark.parametrize(
    ("request_fields", "ready"),
    [
        ({"cache_salt": "tenant-b:"}, {}),
        ({"cache_salt": ""}, {}),
        ({"lora_name": None}, {}),
        ({"lora_name": "mine@d2.1"}, {}),
        ({}, {"numeric_contract_id": "c1"}),
        ({}, {"dtype": "bfloat16"}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({}, {"secret": bytes([1]) * 32}),
    ],
)
def test_another_scope_finds_nothing(disk: Disk, request_fields: dict[str, Any], ready: dict[str, Any]):
    disk.write(TEXT)
    assert disk.found(TEXT) == 12
    other = Disk(disk.path, **ready)
    assert other.found(TEXT, replace(REQUEST, **request_fields)) == 0
    other.close()


def test_an_adapter_that_was_loaded_again_finds_its_blocks(disk: Disk):
    disk.write(TEXT)
    assert disk.found(TEXT, replace(REQUEST, lora_name="mine@d1.7")) == 12


def test_files_of_a_tenant_end_in_a_name_that_tells_nothing(disk: Disk):
    others = [replace(REQUEST, tenant=tenant, cache_salt=tenant + salt) for tenant in ("a", "b") for salt in ("", "s")]
    for request in (REQUEST, *others):
        disk.write(TEXT[:8], request)
    ends = {path.name[64:] for path in disk.path.iterdir()}
    assert len(ends) == 3
    assert all(re.fullmatch("([0-9a-f]{16})?", end) for end in ends)
    other = Disk(disk.path, secret=bytes([1]) * 32)
    assert other.store.chain(others[0], TEXT).scope.owner not in ends
    other.close()


def test_who_shares_prefixes_finds_those_of_others(disk: Disk):
    disk.write(TEXT[:8], replace(REQUEST, tenant="a"))
    assert disk.found(TEXT[:8], replace(REQUEST, tenant="b")) == 2
    disk.write(TEXT[:8], replace(REQUEST, tenant="b"))
    assert len(list(disk.path.iterdir())) == 1


def test_with_states_a_prefix_ends_at_one(tmp_path: Path):
    disk = Disk(tmp_path, has_states=True)
    disk.write(TEXT[:13])
    assert disk.found(TEXT) == 3
    disk.write(TEXT[:41])
    assert disk.found(TEXT) == 10
    assert disk.found(TEXT[:38]) == 3, "blocks without a state are of no use"
    chain = disk.store.chain(REQUEST, TEXT)
    assert len(disk.store.read_state(chain, 10)) == STATE_BYTES
    assert disk.store.num_bytes(disk.store.extents(9, 10)) == 2 * BLOCK_BYTES + STATE_BYTES, "whole files"
    (tmp_path / chain.state_name(10)).unlink()
    with pytest.raises(BlockMissError, match="absent"):
        disk.store.read_state(chain, 10)
    disk.close()


def test_with_windows_a_prefix_ends_where_they_see_what_was_written(tmp_path: Path):
    disk = Disk(tmp_path, groups=FileGroups.of([None, 17, 17]))  # a token sees four blocks before its own
    written = disk.write(TEXT)
    windows = [extent for extent in written if extent.window]
    assert windows == [Extent(8, 12, 17)]
    assert [len(written[extent]) for extent in (Extent(0, 8), *windows)] == [8 * BLOCK_BYTES, 4 * 2 * BLOCK_BYTES]
    assert disk.found(TEXT) == 12
    assert disk.found(TEXT[:44]) == 0, "the first blocks of its window were not written"
    disk.write(TEXT[:16])
    assert disk.found(TEXT[:44]) == 4
    chain = disk.store.chain(REQUEST, TEXT)
    (tmp_path / disk.store.name(chain, windows[0])).write_bytes(b"other")
    assert disk.cause(TEXT, windows[0]) == "damaged"
    assert disk.found(TEXT) == 4
    disk.close()


def test_nothing_on_disk_tells_the_tokens_or_the_client(disk: Disk):
    text = [0x41424344] * 40
    disk.write(text)
    for path in disk.path.iterdir():
        assert re.fullmatch("[0-9a-f]{64}", path.name)  # a server without keys
        content = path.read_bytes()
        assert b"DCBA" not in content
        assert b"tenant-a" not in content


def test_equal_blocks_are_never_sealed_alike(disk: Disk):
    chain = disk.store.chain(REQUEST, TEXT)
    one, other = (b"".join(chain.scope.seal("n", b"text")) for _ in range(2))
    assert one != other


def test_a_long_text_that_is_not_on_disk_costs_the_names_of_one_file(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    disk.write(TEXT)
    num_digests, digest = 0, Scope.digest

    def count(scope: Scope, text: bytes) -> bytes:
        nonlocal num_digests
        num_digests += 1
        return digest(scope, text)

    monkeypatch.setattr(Scope, "digest", count)
    assert disk.found([9] * 100_000) == 0
    assert num_digests <= 1 + MAX_EXTENT_BLOCKS


def test_threads_make_the_names_of_a_text_once(disk: Disk):
    text = list(range(4000))
    expected = disk.store.chain(REQUEST, text)
    names = [expected.name(end) for end in range(expected.num_blocks + 1)]
    chain = disk.store.chain(REQUEST, text)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(chain.name, reversed(range(len(names)))))
    assert found[::-1] == names
