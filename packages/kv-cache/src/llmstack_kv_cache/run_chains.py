"""Chains of runs, from a prefix back to its first block."""

from __future__ import annotations

import struct

from llmstack_kv_cache.prefix_index import MAX_BLOCKS_PER_RUN, ROOT, Prefix, Run

_parent_of = struct.Struct("<q").unpack_from  # a key begins with the identity of the parent


def blocks_of(prefix: Prefix) -> list[int]:
    """The blocks of a prefix, the last one first, without those at its end that are gone.

    None where others are chained to the last one in its run, or where its beginning is gone. O(blocks).
    """
    run, index = prefix.run, min(prefix.index, len(prefix.run.block_ids) - 1)
    found: list[int] = []
    if index < len(run.block_ids) - 1:
        return found
    while run.block_ids and index < len(run.block_ids):
        found += run.block_ids[index::-1]
        parent = run.parent
        if parent is ROOT.run:
            return found
        if parent is None:
            break
        index = _parent_of(run.key)[0] - parent.start
        run = parent
    return []


def restore_parents(start_to_run: dict[int, Run]) -> None:
    """Finds the parents of runs by their keys. O(runs)."""
    for run in start_to_run.values():
        identity = _parent_of(run.key)[0]
        start = identity - identity % MAX_BLOCKS_PER_RUN
        run.parent = start_to_run.get(start) if start else ROOT.run
