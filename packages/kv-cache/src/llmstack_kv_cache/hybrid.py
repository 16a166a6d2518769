"""Hybrid caches: a block table per group of layers over one pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_kv_cache.block import BlockTable, Segment, check_integer, num_blocks_for
from llmstack_kv_cache.block_accounts import BlockAccounts
from llmstack_kv_cache.errors import DuplicateRequestError, UnknownRequestError, shown
from llmstack_kv_cache.groups import (
    NULL_BLOCK_ID,
    GroupTable,
    KVCacheGroup,
    check_computed,
    check_groups,
    interleave,
    longest_common,
    separate,
    useful_blocks,
)
from llmstack_kv_cache.prefix_index import ROOT


class HybridKVCacheManager(BlockAccounts):
    """Like `KVCacheManager`, with a block table for each group of layers.

    Lists of block ids are interleaved: for each block of tokens they have the id of every group, group after group.
    So token i lies in the block at index i // block_size * num_groups + group. `block_tables` separates them.

    All groups take blocks of one pool, so a block must have the same number of bytes in each. A prefix is found if
    every group can serve it: a window needs its last blocks only. The prefixes are known by the blocks of the
    leader, the first group without a window. Where there is none, they are known by the first group's blocks, and a
    prefix is lost once a block that its window has passed is used again.

    Most blocks that a window has passed serve no hit, so they are evicted first. Three kinds keep their place in the
    order of eviction, since a lookup is likely to want them: those that a lookup has found, the last ones of the
    prompt, and the last ones of what the leader knew of the prompt while a window had lost it.

    Args:
        groups: At least one, with different names.
        num_blocks: Blocks of the storage.
        block_size: Tokens per block.
        enable_prefix_caching: Whether anything is ever found.
        num_host_blocks: Blocks of the host storage, to which requests can be swapped out.
        num_reserved_blocks: Leading blocks that are never handed out, at least one: the null block.
        watermark: Share of the blocks that must be left free when a request begins or is swapped in.
        max_events: Events that are kept until they are fetched; with 0 there are none.

    Raises:
        ValueError: A size or the groups make no sense; the text names the argument.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        num_host_blocks: int = 0,
        num_reserved_blocks: int = 1,
        watermark: float = 0.0,
        max_events: int = 0,
    ) -> None:
        check_groups(groups, num_reserved_blocks)
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            num_reserved_blocks=num_reserved_blocks,
            watermark=watermark,
            max_events=max_events,
        )
        self._groups = tuple(groups)
        self._leader = next((i for i, group in enumerate(groups) if group.sliding_window is None), 0)
        self._companions = [number for number in range(len(groups)) if number != self._leader]
        self._tables: dict[str, list[GroupTable]] = {}
        self._last_ends: tuple[str, tuple[int, ...]] = ("", ())  # of the last lookup: where others may end, in blocks
        self._swapped: dict[str, list[tuple[int, int]]] = {}  # passed and held blocks of each group

    @property
    def num_groups(self) -> int:
        """Block ids that a table has for each block of tokens."""
        return len(self._groups)

    @property
    def has_windows(self) -> bool:
        """Whether `advance` ever frees a block."""
        return any(group.sliding_window is not None for group in self._groups)

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest prefix that every group has cached: its block ids and its number of tokens.

        Whole blocks only, and never all tokens; the null block where a window needs none.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return [], 0
        index, max_blocks = self._prefix_index, (len(token_ids) - 1) // self._block_size
        leading, _ = index.find(token_ids, max_blocks, salt)
        identities = [index.prefix(block_id).identity for block_id in leading]
        known: list[list[int | None]]
        known = [[index.find_companion(identity, number) for identity in identities] for number in self._companions]
        known.insert(self._leader, list(leading))
        found = longest_common(self._groups, known, self._block_size)
        self._note_lookup(request_id, len(token_ids))
        self._last_ends = request_id, (len(leading), max_blocks)
        block_ids = interleave(found)
        self._found = block_ids.copy(), ROOT
        return block_ids, len(found[0]) * self._block_size

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """Makes room for the request's first `num_tokens` tokens; the block ids its table gains, or None if full.

        None changes nothing.

        Raises:
            ValueError: `num_tokens` is no positive integer; `computed_block_ids` are not those of
                `get_computed_blocks`, or the request has tables.
            DuplicateRequestError: The request is swapped out.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            check_integer("num_tokens", num_tokens, 1)
        tables = self._tables.get(request_id)
        if tables is None:
            return self._begin_tables(request_id, num_tokens, computed_block_ids, salt)
        if computed_block_ids:
            raise ValueError(f"computed_block_ids: request_id {shown(request_id)} holds blocks already")
        num_new_blocks = num_blocks_for(num_tokens, self._block_size) - tables[0].num_blocks
        if num_new_blocks <= 0:
            return []
        if num_new_blocks * len(tables) > self.num_free_blocks:
            return None
        return interleave([self._append(table, num_new_blocks) for table in tables])

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the request's full blocks below `num_computed_tokens` findable; `token_ids` are its tokens.

        Raises:
            UnknownRequestError: The request holds no blocks.
            ValueError: `num_computed_tokens` is negative, or more than the tokens or slots; a token id is over 32 bits.
        """
        tables = self._held(request_id)
        leader = tables[self._leader]
        check_integer("num_computed_tokens", num_computed_tokens, 0)
        if not 0 <= num_computed_tokens <= min(len(token_ids), leader.num_blocks * self._block_size):
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is not within what the request has")
        self._found = [], ROOT
        first, end = leader.num_cached_blocks, num_computed_tokens // self._block_size
        start = first - leader.num_passed_blocks
        if not self._enable_prefix_caching or end <= first or start < 0:
            return
        block_ids = leader.block_ids[start : end - leader.num_passed_blocks]
        stored, leader.prefix = self._prefix_index.insert(
            block_ids,
            token_ids,
            leader.prefix,
            leader.block_ids[start - 1] if start else None,
            first,
            leader.salt,
            may_be_findable=first < leader.num_full_blocks,
        )
        identities = [self._prefix_index.prefix(block_id).identity for block_id in stored]
        for number in self._companions:
            table = tables[number]
            for i, identity in enumerate(identities, first - table.num_passed_blocks):
                if i >= 0:
                    self._prefix_index.insert_companion(table.block_ids[i], identity, number)
        leader.num_cached_blocks = end
        for table in tables:
            table.num_full_blocks = max(table.num_full_blocks, end)

    def advance(self, request_id: str, num_computed_tokens: int) -> int:
        """Frees the blocks that no token from position `num_computed_tokens` on attends to.

        The step that computes the tokens before it has run, or runs before any step that is given blocks from now on.

        Returns:
            The number of computed tokens from which on another block can be freed.

        Raises:
            UnknownRequestError: The request holds no blocks.
            ValueError: `num_computed_tokens` is not within the request's slots.
        """
        tables = self._held(request_id)
        check_integer("num_computed_tokens", num_computed_tokens, 0)
        if not 0 <= num_computed_tokens <= tables[0].num_blocks * self._block_size:
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is not within what the request has")
        for group, table in zip(self._groups, tables, strict=True):
            self._release_passed(table, group.first_needed_block(num_computed_tokens, self._block_size))
        return min(group.next_passed_token(num_computed_tokens, self._block_size) for group in self._groups)

    def num_blocks_needed(self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int) -> int:
        """As `KVCacheManager.num_blocks_needed`, for a request whose windows are advanced before each step."""
        size = self._block_size
        return sum(
            group.num_blocks_needed(num_tokens, num_computed_tokens, max_num_step_tokens, size)
            for group in self._groups
        )

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds and that are free once it gives them up; 0 if it holds none.

        A block of a window counts only while the request is its one owner: given up by one owner, a block of
        several is not free. Blocks of full attention all count, since they are never given up before the end.
        """
        num_blocks = 0
        for group, table in zip(self._groups, self._tables.get(request_id, ()), strict=False):
            num_blocks += len(table.block_ids)
            if group.sliding_window is not None:
                num_blocks -= sum(map(self._pool.is_shared, table.block_ids))
        return num_blocks

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """Whether a fork can go on from the request's first `num_tokens` tokens: no window has passed what it needs.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        return all(
            table.num_passed_blocks <= group.first_needed_block(num_tokens, self._block_size)
            for group, table in zip(self._groups, self._held(request_id), strict=True)
        )

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child_id` the parent's first `num_tokens` tokens; block copies (source, destination), None if full.

        As `KVCacheManager.fork`, in every group.

        Raises:
            UnknownRequestError: The parent holds no blocks.
            DuplicateRequestError: The child holds blocks already.
            ValueError: `num_tokens` is not within the parent's slots, or a window has passed what the child needs.
        """
        parents = self._held(parent_id)
        if child_id in self._tables or self._host_pool.holds(child_id):
            raise DuplicateRequestError(child_id)
        check_integer("num_tokens", num_tokens, 1)
        if not 1 <= num_tokens <= parents[0].num_blocks * self._block_size:
            raise ValueError(f"num_tokens {num_tokens} is not within the slots of {shown(parent_id)}")
        if not self.keeps_prefix(parent_id, num_tokens):
            raise ValueError(f"num_tokens {num_tokens} needs blocks that a window has passed")
        num_full_blocks, num_rest = divmod(num_tokens, self._block_size)
        num_copies = 1 if num_rest else 0
        if num_copies * len(parents) > self.num_free_blocks:
            return None
        copies: list[tuple[int, int]] = []
        self._tables[child_id] = [self._fork(parent, num_full_blocks, num_copies, copies) for parent in parents]
        self._num_forks += 1
        return copies

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Moves the request to the host pool; copies (block, host block) of all groups, None if there is no room.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        tables = self._held(request_id)
        block_ids = [block_id for table in tables for block_id in table.block_ids]
        host_block_ids = self._host_pool.take(request_id, len(block_ids), tables[0].salt)
        if host_block_ids is None:
            return None
        self._swapped[request_id] = [(table.num_passed_blocks, len(table.block_ids)) for table in tables]
        self._release(request_id)
        return list(zip(block_ids, host_block_ids, strict=True))

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Swaps a request in; copies (host block, block) of all groups, None if there is no room.

        Raises:
            UnknownRequestError: The request is not in the host pool.
        """
        host_block_ids = self._host_pool.block_ids(request_id)
        if not self._admits(len(host_block_ids), is_first=not self._tables):
            return None
        salt = self._host_pool.swap_in(request_id)
        tables = self._tables[request_id] = []
        swapped = self._swapped.pop(request_id)
        for (num_passed_blocks, num_blocks), useful in zip(swapped, self._useful_blocks(0, ()), strict=True):
            tables.append(GroupTable(salt, num_passed_blocks, useful))
            self._append(tables[-1], num_blocks)
        return list(zip(host_block_ids, (block_id for table in tables for block_id in table.block_ids), strict=True))

    def free(self, request_id: str) -> None:
        """Drops the request's references, here or in the host pool. Idempotent."""
        if request_id in self._tables:
            self._release(request_id)
        elif self._host_pool.holds(request_id):
            self._host_pool.release(request_id)
            del self._swapped[request_id]

    def block_table(self, request_id: str) -> list[int]:
        """The request's block ids, interleaved; the null block where a window has passed.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        return interleave(self.block_tables(request_id))

    def block_tables(self, request_id: str) -> list[list[int]]:
        """The request's block ids by group: token i lies in the one at index i // block_size.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        return [table.full_table() for table in self._held(request_id)]

    def _begin_tables(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int], salt: str
    ) -> list[int] | None:
        if self._host_pool.holds(request_id):
            raise DuplicateRequestError(request_id)
        computed = separate(computed_block_ids, len(self._groups))
        num_computed_blocks = len(computed[0])
        if list(computed_block_ids) != self._found[0]:  # what the last lookup has found needs no further check
            check_computed(self._groups, self._leader, computed, self._block_size, self._pool)
        useful = self._useful_blocks(
            num_computed_blocks, self._last_ends[1] if self._last_ends[0] == request_id else ()
        )
        passed = [block_ids.count(NULL_BLOCK_ID) for block_ids in computed]
        tables = [GroupTable(salt, *fields) for fields in zip(passed, useful, strict=True)]
        held = [block_ids[table.num_passed_blocks :] for table, block_ids in zip(tables, computed, strict=True)]
        num_new_blocks = max(num_blocks_for(num_tokens, self._block_size) - num_computed_blocks, 0)
        num_free_computed = self._pool.count_free([block_id for block_ids in held for block_id in block_ids])
        if not self._admits(num_new_blocks * len(tables) + num_free_computed, is_first=not self._tables):
            return None
        if num_computed_blocks:
            tables[self._leader].num_cached_blocks = num_computed_blocks
            tables[self._leader].prefix = self._prefix_index.prefix(computed[self._leader][-1])
        for table, block_ids in zip(tables, held, strict=True):
            table.num_full_blocks = num_computed_blocks
            table.block_ids = block_ids
            self._pool.share(block_ids, table)
        for table in tables:
            self._append(table, num_new_blocks)
        self._tables[request_id] = tables
        self._count_lookup(request_id, num_computed_blocks * self._block_size)
        return interleave([table.full_table() for table in tables])

    def _useful_blocks(self, num_found_blocks: int, ends: Sequence[int]) -> list[list[range]]:
        return useful_blocks(self._groups, self._leader, num_found_blocks, ends, self._block_size)

    def _append(self, table: GroupTable, num_blocks: int) -> list[int]:
        self._found = [], ROOT
        block_ids = self._pool.take(num_blocks, table)
        table.block_ids += block_ids
        return block_ids

    def _fork(
        self, parent: GroupTable, num_full_blocks: int, num_copies: int, copies: list[tuple[int, int]]
    ) -> GroupTable:
        """The child's table in one group, and in `copies` what is to be copied for it."""
        child = GroupTable(parent.salt, parent.num_passed_blocks, parent.useful)
        parent.share_with(child, num_full_blocks)
        end = num_full_blocks - parent.num_passed_blocks
        child.block_ids = parent.block_ids[:end]
        self._pool.share(child.block_ids, child)
        copies += zip(parent.block_ids[end:], self._append(child, num_copies), strict=False)
        return child

    def _release_passed(self, table: GroupTable, first_needed: int) -> None:
        if first_needed > table.num_passed_blocks:
            useful, others = table.pass_blocks(first_needed - table.num_passed_blocks)
            self._pool.release(Segment(useful))
            self._pool.release_useless(Segment(others))

    def _release(self, request_id: str) -> None:
        """Frees all blocks; what a lookup of the whole request would not want counts as passed."""
        for group, table in zip(self._groups, self._tables.pop(request_id), strict=True):
            num_tokens = table.num_full_blocks * self._block_size
            self._release_passed(table, group.first_needed_block(num_tokens, self._block_size))
            self._pool.release(table)

    def _held(self, request_id: str) -> list[GroupTable]:
        tables = self._tables.get(request_id)
        if tables is None:
            raise UnknownRequestError(request_id)
        return tables

    def _held_tables(self) -> Iterable[BlockTable]:
        return (table for tables in self._tables.values() for table in tables)

    def _num_requests(self) -> int:
        return len(self._tables)

    def _request_problems(self) -> list[str]:
        problems = []
        if any(len({table.num_blocks for table in tables}) != 1 for tables in self._tables.values()):
            problems.append("the groups of a request reach over different numbers of blocks")
        if any(not self._host_pool.holds(request_id) or request_id in self._tables for request_id in self._swapped):
            problems.append("a request is in both pools, or in none")
        return problems
