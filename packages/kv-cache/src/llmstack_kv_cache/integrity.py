"""The books of a cache, counted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_kv_cache.block_accounts import BlockAccounts


def inconsistencies(manager: BlockAccounts) -> list[str]:
    """Violated invariants of the pools and of the tables of requests; O(number of blocks)."""
    tables = [one for table in manager._tables.values() for one in manager._by_group(table)]
    problems = manager._pool.inconsistencies(tables) + manager._host_pool.inconsistencies()
    if any(manager._pool.is_shared(block_id) for table in tables for block_id in table.writable):
        problems.append("a block that is still written has several owners")
    if not all(table.num_cached_blocks <= table.num_full_blocks <= table.num_blocks for table in tables):
        problems.append("a table has more cached or full blocks than blocks")
    if any(one.num_blocks != table.num_blocks for table in manager._tables.values() for one in table.companions):
        problems.append("the groups of a request reach over different numbers of blocks")
    windows = [group.sliding_window for group in manager._groups] * len(manager._tables)
    if any(one.num_passed_blocks for window, one in zip(windows, tables, strict=True) if window is None):
        problems.append("a table without a window has passed blocks")
    if manager._swapped.keys() & manager._tables.keys() or list(manager._swapped) != manager._host_pool.request_ids:
        problems.append("a request is in both pools, or in none")
    if manager._states is not None:
        problems += manager._states.inconsistencies(manager._tables.keys() | manager._swapped.keys())
    return problems
