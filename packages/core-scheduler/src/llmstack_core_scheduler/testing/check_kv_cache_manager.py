"""Conformance check of KV-cache managers."""

from __future__ import annotations

from collections.abc import Callable

from llmstack_core_scheduler.protocols import KVCacheManager


def check_kv_cache_manager(
    factory: Callable[[int, int], KVCacheManager],
    host_factory: Callable[[int, int, int], KVCacheManager] | None = None,
    *,
    num_reserved_blocks: int = 0,
) -> None:
    """Checks what the scheduler relies on, of a manager with one group of layers.

    Args:
        factory: From the number of blocks that requests can use and the block size to a manager.
        host_factory: As `factory`, with a number of host blocks as the third argument; None checks no swaps.
        num_reserved_blocks: Leading block ids that no request may be given.

    Raises:
        AssertionError: The manager is not one; the text says what it did.
    """
    _check_allocation(factory(4, 2), num_reserved_blocks)
    _check_needs(factory(4, 2))
    _check_refusal(factory(4, 2))
    _check_prefix_hits(factory(8, 2))
    _check_lookups_in_pieces(factory(8, 2))
    _check_forgetting(factory(8, 2))
    _check_reset(factory(4, 2))
    _check_fork(factory(4, 2))
    if host_factory is not None:
        _check_swap(host_factory(4, 2, 3))


def _check_allocation(manager: KVCacheManager, first_block_id: int) -> None:
    _expect("num_blocks, block_size", (manager.num_blocks, manager.block_size), (4, 2))
    first = manager.allocate_slots("a", 3)
    _expect("blocks for 3 tokens of 2 per block", len(set(first or ())), 2)
    _expect("block ids in range", [b for b in first or () if not 0 <= b - first_block_id < 4], [])
    _expect("blocks for a slot that is there", manager.allocate_slots("a", 4), [])
    second = manager.allocate_slots("a", 5) or []
    _expect("one more block at the border", len(set(second) - set(first or ())), 1)
    _expect("free blocks", manager.num_free_blocks, 1)
    manager.free("a")
    manager.free("a")
    _expect("free blocks after free, twice", manager.num_free_blocks, 4)


def _check_needs(manager: KVCacheManager) -> None:
    _expect("groups of layers", manager.num_groups, 1)
    _expect("blocks that 5 tokens need", manager.num_blocks_needed(5, 0, 5), 3)
    _expect("blocks of an unknown request", manager.num_held_blocks("a"), 0)
    manager.allocate_slots("a", 5)
    _expect("blocks held", manager.num_held_blocks("a"), 3)
    _expect("the whole prefix is there", manager.keeps_prefix("a", 4), True)
    _expect("nothing to free before the next time", manager.advance("a", 4) > 4, True)
    _expect("free blocks after advancing by less than a window", manager.num_free_blocks, 1)


def _check_refusal(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 5)
    _expect("None for a new request without room", manager.allocate_slots("b", 3), None)
    _expect("None for a known request without room", manager.allocate_slots("a", 9), None)
    _expect("free blocks after a refusal", manager.num_free_blocks, 1)
    _expect("room for what is left", len(manager.allocate_slots("b", 2) or ()), 1)


def _check_prefix_hits(manager: KVCacheManager) -> None:
    token_ids = [1, 2, 3, 4, 5, 6]
    table = manager.allocate_slots("a", 6, salt="s") or []
    manager.cache_blocks("a", token_ids, 6)
    _expect("hit of a running request", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table, 6))
    _expect("other salt", manager.get_computed_blocks("b", token_ids, "t"), ([], 0))
    _expect("other tokens", manager.get_computed_blocks("b", [1, 2, 9, 4, 5, 6], "s"), (table[:1], 2))
    _expect("never all tokens", manager.get_computed_blocks("b", token_ids, "s"), (table[:2], 4))
    shared = manager.allocate_slots("b", 6, table[:2], "s") or []
    _expect("shared blocks are the head of the answer", shared[:2], table[:2])
    _expect("free blocks, two of them shared", manager.num_free_blocks, 4)
    manager.free("a")
    _expect("shared blocks are still held", manager.num_free_blocks, 5)
    manager.free("b")
    _expect("hit of a finished request", manager.get_computed_blocks("c", [*token_ids, 7], "s")[1], 6)


def _check_lookups_in_pieces(manager: KVCacheManager) -> None:
    token_ids = [1, 2, 3, 4, 5, 6]
    table = manager.allocate_slots("a", 6, salt="s") or []
    manager.cache_blocks("a", token_ids, 4)
    _expect("a piece of a lookup", manager.look_ahead("b", [*token_ids, 7], 1, "s"), 1)
    _expect("the rest of it", manager.look_ahead("b", [*token_ids, 7], 5, "s"), 1)
    _expect("nothing further", manager.look_ahead("b", [*token_ids, 7], 5, "s"), 0)
    manager.cache_blocks("a", token_ids, 6)
    _expect("what became known", manager.look_ahead("b", [*token_ids, 7], 5, "s"), 1)
    _expect("the whole hit", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table, 6))
    manager.forget_prefix(token_ids, 2, "s")
    _expect("what was forgotten", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table[:1], 2))
    manager.free("b")
    _expect("a lookup from the beginning, after the end", manager.look_ahead("b", [*token_ids, 7], 5, "s"), 1)


def _check_forgetting(manager: KVCacheManager) -> None:
    token_ids = [1, 2, 3, 4, 5, 6]
    table = manager.allocate_slots("a", 6, salt="s") or []
    manager.cache_blocks("a", token_ids, 6)
    manager.forget_prefix(token_ids, 3, "t")
    _expect("hit after another salt was forgotten", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table, 6))
    manager.forget_prefix(token_ids, 3, "s")
    _expect("hit of what is left", manager.get_computed_blocks("b", [*token_ids, 7], "s"), (table[:1], 2))
    manager.free("a")
    _expect("free blocks after forgetting", manager.num_free_blocks, 8)


def _check_reset(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 2)
    manager.cache_blocks("a", [1, 2], 2)
    _expect("no reset while a request holds blocks", manager.reset_prefix_cache(), False)
    manager.free("a")
    _expect("reset", manager.reset_prefix_cache(), True)
    _expect("nothing found after it", manager.get_computed_blocks("b", [1, 2, 3]), ([], 0))


def _check_fork(manager: KVCacheManager) -> None:
    table = manager.allocate_slots("a", 4) or []
    copies = manager.fork("a", "b", 3) or []
    _expect("the block that is begun is copied", [source for source, _ in copies], table[1:])
    _expect("the table of a fork", manager.block_table("b"), [table[0], copies[0][1]])
    _expect("free blocks after a fork", manager.num_free_blocks, 1)
    _expect("full blocks are shared without copies", manager.fork("a", "c", 4), [])
    manager.allocate_slots("b", 6)
    _expect("no fork without a block to copy to", manager.fork("a", "d", 3), None)
    manager.free("a")
    _expect("shared blocks are still held", manager.num_free_blocks, 0)
    for request_id in "bc":
        manager.free(request_id)
    _expect("free blocks after all have ended", manager.num_free_blocks, 4)


def _check_swap(manager: KVCacheManager) -> None:
    table = manager.allocate_slots("a", 5) or []
    swap_outs = manager.swap_out("a") or []
    _expect("all blocks go to the host", [block_id for block_id, _ in swap_outs], table)
    _expect("free blocks of both pools", (manager.num_free_blocks, manager.num_free_host_blocks), (4, 0))
    manager.allocate_slots("b", 4)
    _expect("no swap-out without room on the host", manager.swap_out("b"), None)
    _expect("no swap-in without room", manager.swap_in("a"), None)
    manager.free("b")
    swap_ins = manager.swap_in("a") or []
    _expect("they are swapped in in order", [host for host, _ in swap_ins], [host for _, host in swap_outs])
    _expect("the table of the swapped-in request", manager.block_table("a"), [block_id for _, block_id in swap_ins])
    manager.swap_out("a")
    manager.free("a")
    _expect("free blocks at the end", (manager.num_free_blocks, manager.num_free_host_blocks), (4, 3))


def _expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")
