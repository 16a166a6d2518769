"""The books of block tables, counted again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_kv_cache.block import BlockTable
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.groups import KVCacheGroup


def table_inconsistencies(
    requests: Iterable[Sequence[BlockTable]], groups: Sequence[KVCacheGroup], pool: BlockPool
) -> list[str]:
    """Violated invariants of all tables, of which each request has one in each group; O(number of blocks)."""
    requests = list(requests)
    tables = [table for request in requests for table in request]
    problems = pool.inconsistencies(tables)
    if any(pool.is_shared(block_id) for table in tables for block_id in table.writable):
        problems.append("a block that is still written has several owners")
    if not all(table.num_cached_blocks <= table.num_full_blocks <= table.num_blocks for table in tables):
        problems.append("a table has more cached or full blocks than blocks")
    if any(table.num_blocks != request[0].num_blocks for request in requests for table in request):
        problems.append("the groups of a request reach over different numbers of blocks")
    windows = [group.sliding_window for group in groups] * len(requests)
    if any(table.num_passed_blocks for window, table in zip(windows, tables, strict=True) if window is None):
        problems.append("a table without a window has passed blocks")
    return problems
