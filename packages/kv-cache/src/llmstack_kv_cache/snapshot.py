"""Snapshots of a cache: its state as plain data, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import astuple
from itertools import chain
from typing import Any

from llmstack_kv_cache.block import BlockTable
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.errors import KVCacheIntegrityError
from llmstack_kv_cache.kv_cache_manager import KVCacheManager
from llmstack_kv_cache.prefix_index import ROOT, Prefix, PrefixIndex, Run
from llmstack_kv_cache.prefix_walk import PrefixWalk
from llmstack_kv_cache.run_chains import restore_parents
from llmstack_kv_cache.session_snapshot import ledger_state, restore_ledger
from llmstack_kv_cache.session_turns import Segment
from llmstack_kv_cache.states import RequestStates, StateTable
from llmstack_kv_cache.states import State as LayerState

State = dict[str, Any]
"""Builtins only, which msgpack and JSON with bytes can hold."""


def num_snapshot_items(manager: KVCacheManager) -> int:
    """The number of values in a snapshot, about; O(lookups under way)."""
    num_others = 0 if manager._ledger is None else manager._ledger.num_snapshot_items
    num_others += sum(walk.num_blocks for walk in manager._walks.values())
    return 2 * manager.num_blocks + manager.block_size * manager._prefix_index.num_findable + num_others


def take_snapshot(manager: KVCacheManager) -> State:
    """All that the answers of a cache depend on: equal snapshots mean equal answers from now on.

    Copies, so that the cache can go on. The last lookup and the events for routers are no part of it. O(blocks).
    """
    pool, index, host = manager._pool, manager._prefix_index, manager._host_pool
    segments = list(pool._segments)
    return {
        "blocks": [len(pool._holders), pool.num_free_blocks, pool.num_evictions],
        "owners": list(chain.from_iterable(pool._num_owners.items())),
        "unfindable": pool._unfindable.copy(),
        "segments": [_segment_state(pool, segment) for segment in segments],
        "collectors": [_place(segments, pool._collector), _place(segments, pool._useless_collector)],
        "runs": [
            (run.start, run.key, run.contents, run.block_ids.copy(), run.max_blocks)
            for run in index._key_to_run.values()
        ],
        "next_start": index._next_start,
        "host": [host.num_swap_outs, host.num_swap_ins, host._free.copy()],
        "host_tables": [
            (request_id, host._request_id_to_salt[request_id], block_ids.copy())
            for request_id, block_ids in host._request_id_to_block_ids.items()
        ],
        "counters": [
            manager.prefix_cache_queries,
            manager.prefix_cache_hits,
            manager._num_forks,
            manager.prefix_tokens_without_state,
        ],
        "tables": [
            (name, [_table_state(one) for one in manager._by_group(table)]) for name, table in manager._tables.items()
        ],
        "swapped": [(name, [list(pair) for pair in pairs]) for name, pairs in manager._swapped.items()],
        "walks": [(name, walk.known()) for name, walk in manager._walks.items()],
        "sessions": None if manager._ledger is None else ledger_state(manager._ledger, segments),
        "states": None if manager._states is None else _states_state(manager._states),
    }


def restore_snapshot(manager: KVCacheManager, state: State) -> None:
    """Puts a new cache, built with the same arguments, into the state of a snapshot. O(blocks).

    Raises:
        ValueError: The snapshot is of another kind of cache, or its books do not agree.
    """
    pool, index, host = manager._pool, manager._prefix_index, manager._host_pool
    try:
        if state["blocks"][0] != len(pool._holders):
            raise ValueError(f"the snapshot has {state['blocks'][0]} blocks, the cache {len(pool._holders)}")
        _restore_index(index, state)
        for name, block_ids in state["walks"]:
            manager._walks[name] = PrefixWalk(index)
            manager._walks[name].restore(block_ids)
        tables = _restore_tables(manager, state, {run.start: run for run in index._key_to_run.values()})
        _restore_pool(pool, state, tables)
        if manager._ledger is not None:
            runs = {run.start: run for run in index._key_to_run.values()}
            restore_ledger(manager._ledger, state["sessions"], list(pool._segments), runs)
        host.num_swap_outs, host.num_swap_ins, host._free = state["host"]
        host._request_id_to_block_ids = {request_id: block_ids for request_id, _, block_ids in state["host_tables"]}
        host._request_id_to_salt = {request_id: salt for request_id, salt, _ in state["host_tables"]}
        manager.prefix_cache_queries, manager.prefix_cache_hits, *counters = state["counters"]
        manager._num_forks, manager.prefix_tokens_without_state = counters
        if manager._states is not None:
            _restore_states(manager._states, state["states"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it is no snapshot of a cache: {type(error).__name__}") from error
    try:
        manager.check_integrity()
    except KVCacheIntegrityError as error:
        raise ValueError(f"the books of the snapshot do not agree: {error}") from error


def _place(segments: list[Segment], collector: Segment | None) -> int:
    return next((i for i, segment in enumerate(segments) if segment is collector), -1)


def _segment_state(pool: BlockPool, segment: Segment) -> tuple[list[int], list[int]]:
    """The blocks of a free segment, and those that are still free as part of it where that is not all of them."""
    is_whole = segment.num_free == len(segment.block_ids)
    return segment.block_ids.copy(), [] if is_whole else pool._left(segment)


def _table_state(table: BlockTable) -> tuple[Any, ...]:
    counts = table.num_full_blocks, table.num_cached_blocks
    prefix = table.prefix.run.start, table.prefix.index
    useful = [[useful.start, useful.stop] for useful in table.useful]
    return (table.salt, table.block_ids.copy(), *counts, table.copies.copy(), *prefix, table.num_blocks, useful)


def _states_state(states: RequestStates) -> State:
    """The states of all requests and of the pool. Between steps only."""
    return {
        "pool": states.pool.snapshot(),
        "step": states._step,
        "tables": [
            (request_id, list(table.last_kept or ()), [list(astuple(state)) for state in table.states])
            for request_id, table in states.tables.items()
        ],
    }


def _restore_index(index: PrefixIndex, state: State) -> None:
    for start, key, contents, block_ids, max_blocks in state["runs"]:
        run = index._key_to_run[key] = Run(start, key, contents, list(block_ids))
        run.max_blocks = max_blocks
        for block_id in run.block_ids:
            index.runs[block_id] = run
        index.num_findable += len(run.block_ids)
    restore_parents({run.start: run for run in index._key_to_run.values()})
    index._next_start = state["next_start"]


def _restore_tables(manager: KVCacheManager, state: State, runs: dict[int, Run]) -> list[BlockTable]:
    made = [(name, [_restore_table(table, runs) for table in tables]) for name, tables in state["tables"]]
    for name, tables in made:
        manager._hold(name, tables)
    manager._swapped = {name: [(passed, held) for passed, held in pairs] for name, pairs in state["swapped"]}
    return [table for _, tables in made for table in tables]


def _restore_table(state: Iterable[Any], runs: dict[int, Run]) -> BlockTable:
    salt, block_ids, num_full, num_cached, copies, start, index, num_blocks, useful = state
    table = BlockTable(salt, list(block_ids), num_blocks, tuple(range(*ends) for ends in useful))
    table.num_full_blocks, table.num_cached_blocks, table.copies = num_full, num_cached, list(copies)
    table.prefix = Prefix(runs.get(start) or _gone(start), index) if start else ROOT
    return table


def _restore_states(states: RequestStates, state: State) -> None:
    states.pool.restore(state["pool"])
    states._step = state["step"]
    for request_id, last_kept, fields in state["tables"]:
        *before, current = (LayerState(*values) for values in fields)
        kept = (last_kept[0], last_kept[1]) if last_kept else None
        states.tables[request_id] = StateTable(current, before[0] if before else None, kept)


def _gone(start: int) -> Run:
    """A run of which nothing can be found any more: only its identities matter, and it never grows."""
    run = Run(start, b"", b"", [])
    run.max_blocks = 0
    return run


def _restore_pool(pool: BlockPool, state: State, tables: Iterable[BlockTable]) -> None:
    _, pool.num_free_blocks, pool.num_evictions = state["blocks"]
    owners = state["owners"]
    pool._num_owners = dict(zip(owners[::2], owners[1::2], strict=True))
    pool._unfindable = list(state["unfindable"])
    holders: list[Segment | None] = [None] * len(pool._holders)
    pool._segments.clear()
    for number, (block_ids, left) in enumerate(state["segments"]):
        segment = Segment(list(block_ids))
        free = left or block_ids
        segment.num_free = len(free)
        OrderedDict.__setitem__(pool._segments, segment, None)  # the order is restored later
        if number == state["collectors"][0]:
            pool._collector = segment
        if number == state["collectors"][1]:
            pool._useless_collector = segment
        for block_id in free:
            holders[block_id] = segment
    for table in tables:
        for block_id in table.block_ids:
            holders[block_id] = table
    for block_id in pool._num_owners:
        holders[block_id] = pool._shared
    pool._holders = holders
