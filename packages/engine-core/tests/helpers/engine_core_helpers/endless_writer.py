"""Prefixes of which a process writes some to disk again and again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from llmstack_engine_core.disk_cache.file_groups import Extent
from llmstack_engine_core.disk_cache.open_store import open_files
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.scopes import Chain
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_types import EngineCoreRequest, EngineReady, SamplingParams

BLOCK_BYTES, NUM_TEXTS, MAX_BYTES = 64 << 10, 12, 4 << 20
REQUEST = EngineCoreRequest("r", [1], SamplingParams())
TENANTS = ("", "a", "b")


def open_store(folder: Path) -> PrefixStore:
    files, secret = open_files("the folder", str(folder), MAX_BYTES)
    return PrefixStore(files, secret, TagMaker(EngineReady(64, 4, 64, 97, "float32", "cpu"), BLOCK_BYTES))


def texts() -> Iterator[list[int]]:
    for number in range(NUM_TEXTS):
        yield [number % 3, *range(5 * number)]


def blocks_of(chain: Chain, extent: Extent) -> bytes:
    """What belongs to the tokens, and to no others."""
    return hashlib.shake_128(chain.head(extent.start, extent.end)).digest(extent.num_blocks * BLOCK_BYTES)


def write_endlessly(folder: Path, seed: int, begin: Callable[[], object]) -> NoReturn:
    """Opens the folder, calls `begin`, and writes until the process is killed."""
    store, pick, all_texts = open_store(folder), random.Random(seed), list(texts())
    begin()
    while True:
        request = replace(REQUEST, tenant=pick.choice(TENANTS))  # who share all of it
        chain = store.chain(request, pick.choice(all_texts))
        for extent in store.extents(0, chain.num_blocks):
            text, start = store.content(chain, extent)
            text[start:] = blocks_of(chain, extent)
            name = chain.name(extent.end)
            store.files.write(name, chain.scope.seal(name, text), chain.scope.owner)
        store.touch(chain, chain.num_blocks)
