"""The KV-cache manager: blocks of requests, and prefix caching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_kv_cache.block import BlockTable, check_integer, num_blocks_for
from llmstack_kv_cache.block_accounts import BlockAccounts
from llmstack_kv_cache.errors import DuplicateRequestError, UnknownRequestError, shown
from llmstack_kv_cache.groups import NEVER
from llmstack_kv_cache.prefix_index import ROOT


class KVCacheManager(BlockAccounts):
    """Blocks of a paged KV cache, by request, with prefix caching.

    Knows block ids and token ids only; the tensors belong to the caller. Having no room is an answer (None), never an
    exception. Equal calls give equal answers: no clock, no randomness, no order of a set. The arguments are those of
    `BlockAccounts`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        num_host_blocks: int = 0,
        num_reserved_blocks: int = 0,
        watermark: float = 0.0,
        max_events: int = 0,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            num_reserved_blocks=num_reserved_blocks,
            watermark=watermark,
            max_events=max_events,
        )
        self._tables: dict[str, BlockTable] = {}

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest cached prefix of `token_ids` under `salt`: its block ids and its number of tokens.

        Whole blocks only, and never all tokens, so that one is left to compute. O(tokens found). Takes nothing: the
        blocks are safe until another request is given blocks.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return [], 0
        block_ids, prefix = self._prefix_index.find(token_ids, (len(token_ids) - 1) // self._block_size, salt)
        self._note_lookup(request_id, len(token_ids))
        self._found = block_ids.copy(), prefix
        return block_ids, len(block_ids) * self._block_size

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """Makes room for the request's first `num_tokens` tokens; the block ids appended to its table, or None if full.

        A request that holds nothing begins with `computed_block_ids` (from `get_computed_blocks`), which are part of
        the answer. None changes nothing. O(blocks appended).

        Raises:
            ValueError: `num_tokens` is no positive integer; `computed_block_ids` are not the blocks of a cached
                prefix, in order, or the request has a table.
            DuplicateRequestError: The request is swapped out.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            check_integer("num_tokens", num_tokens, 1)
        table = self._tables.get(request_id)
        if table is None:
            return self._begin_table(request_id, num_tokens, list(computed_block_ids), salt)
        if computed_block_ids:
            raise ValueError(f"computed_block_ids: request_id {shown(request_id)} holds blocks already")
        num_new_blocks = num_blocks_for(num_tokens, self._block_size) - len(table.block_ids)
        if num_new_blocks <= 0:
            return []
        if num_new_blocks > self._pool.num_free_blocks:
            return None
        block_ids = self._take(num_new_blocks, table)
        table.block_ids += block_ids
        return block_ids

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the request's full blocks below `num_computed_tokens` findable; `token_ids` are its tokens.

        May be called before the blocks are filled, if every reader runs after, or together with, the step that fills
        them. O(tokens that became findable).

        Raises:
            UnknownRequestError: The request holds no blocks.
            ValueError: `num_computed_tokens` is negative, or more than the tokens or slots; a token id is over 32 bits.
        """
        table = self._table(request_id)
        if type(num_computed_tokens) is not int:
            check_integer("num_computed_tokens", num_computed_tokens, 0)
        if not 0 <= num_computed_tokens <= min(len(token_ids), len(table.block_ids) * self._block_size):
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is not within what the request has")
        if not self._enable_prefix_caching:
            return
        num_full_blocks = num_computed_tokens // self._block_size
        first = table.num_cached_blocks
        if num_full_blocks <= first:
            return
        block_ids = table.block_ids[first:num_full_blocks]
        stored_block_ids, table.prefix = self._prefix_index.insert(
            block_ids,
            token_ids,
            table.prefix,
            table.block_ids[first - 1] if first else None,
            first,
            table.salt,
            may_be_findable=first < table.num_full_blocks,
        )
        if stored_block_ids != block_ids:
            table.copies += [mine for mine, stored in zip(block_ids, stored_block_ids, strict=True) if mine != stored]
        table.num_cached_blocks = num_full_blocks
        table.num_full_blocks = max(table.num_full_blocks, num_full_blocks)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child_id` the parent's first `num_tokens` tokens; block copies (source, destination), None if full.

        Full blocks are shared; a last one that is begun is copied, so that no block is ever written by two. The copy
        is the caller's to perform before either request writes again. None changes nothing.

        Raises:
            UnknownRequestError: The parent holds no blocks.
            DuplicateRequestError: The child holds blocks already, here or in the host pool.
            ValueError: `num_tokens` is not positive, or more than the parent has slots for.
        """
        parent = self._table(parent_id)
        if child_id in self._tables or self._host_pool.holds(child_id):
            raise DuplicateRequestError(child_id)
        check_integer("num_tokens", num_tokens, 1)
        if not 1 <= num_tokens <= len(parent.block_ids) * self._block_size:
            raise ValueError(f"num_tokens {num_tokens} is not within the slots of {shown(parent_id)}")
        num_full_blocks, num_rest = divmod(num_tokens, self._block_size)
        num_copies = 1 if num_rest else 0
        if num_copies > self._pool.num_free_blocks:
            return None
        child = BlockTable(parent.salt)
        parent.share_with(child, num_full_blocks)
        child.block_ids = parent.block_ids[:num_full_blocks]
        self._pool.share(child.block_ids, child)
        copied_block_ids = self._take(num_copies, child)
        child.block_ids += copied_block_ids
        self._tables[child_id] = child
        self._num_forks += 1
        return list(zip(parent.block_ids[num_full_blocks:], copied_block_ids, strict=False))

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Moves the request to the host pool; copies (block, host block) for the caller to perform, None if no room.

        The blocks are free at once, so the copies come before anything else is written. None changes nothing.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        table = self._table(request_id)
        host_block_ids = self._host_pool.take(request_id, len(table.block_ids), table.salt)
        if host_block_ids is None:
            return None
        copies = list(zip(table.block_ids, host_block_ids, strict=True))
        self._pool.release(self._tables.pop(request_id), table.unfindable)
        return copies

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Swaps a request in; copies (host block, block) in the order of its new table, None if there is no room.

        The host blocks are free at once: in a step, all copies to the host come before those from it. None changes
        nothing.

        Raises:
            UnknownRequestError: The request is not in the host pool.
        """
        host_block_ids = self._host_pool.block_ids(request_id)
        if not self._admits(len(host_block_ids), is_first=not self._tables):
            return None
        table = BlockTable(self._host_pool.swap_in(request_id))
        table.block_ids = self._take(len(host_block_ids), table)
        self._tables[request_id] = table
        return list(zip(host_block_ids, table.block_ids, strict=True))

    def free(self, request_id: str) -> None:
        """Drops the request's references, last block first: the head of a prefix is evicted last. Idempotent.

        A swapped-out request gives its host blocks back.
        """
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.release(table, table.unfindable)
        elif self._host_pool.holds(request_id):
            self._host_pool.release(request_id)

    def block_table(self, request_id: str) -> list[int]:
        """A copy of the request's block ids: token i lies in the one at index i // block_size.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        return self._table(request_id).block_ids.copy()

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks in the request's table; 0 for a request that holds none."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table.block_ids)

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """Whether another request can go on from the first `num_tokens` tokens of this one: always, without windows."""
        return True

    def advance(self, request_id: str, num_computed_tokens: int) -> int:
        """Frees what windows have passed: nothing here. The number of computed tokens at which to call it again."""
        return NEVER

    def _held_tables(self) -> Iterable[BlockTable]:
        return self._tables.values()

    def _num_requests(self) -> int:
        return len(self._tables)

    def _request_problems(self) -> list[str]:
        both = [request_id for request_id in self._tables if self._host_pool.holds(request_id)]
        return [f"{len(both)} requests are in both pools"] if both else []

    def _begin_table(
        self, request_id: str, num_tokens: int, computed_block_ids: list[int], salt: str
    ) -> list[int] | None:
        if self._host_pool.holds(request_id):
            raise DuplicateRequestError(request_id)
        found, prefix = self._found
        if computed_block_ids != found:
            if not self._prefix_index.is_chain(computed_block_ids):
                raise ValueError("computed_block_ids must be the blocks of a prefix, from get_computed_blocks")
            prefix = self._prefix_index.prefix(computed_block_ids[-1]) if computed_block_ids else ROOT
        num_computed_blocks = len(computed_block_ids)
        num_new_blocks = max(num_blocks_for(num_tokens, self._block_size) - num_computed_blocks, 0)
        is_first = not self._tables
        # Nothing needs to be counted where there is room even if all computed blocks are free ones.
        if not self._admits(num_new_blocks + num_computed_blocks, is_first):
            num_free_computed_blocks = self._pool.count_free(computed_block_ids)
            if not self._admits(num_new_blocks + num_free_computed_blocks, is_first):
                return None
        table = BlockTable(salt)
        if computed_block_ids:
            self._pool.share(computed_block_ids, table)
            table.num_cached_blocks = table.num_full_blocks = num_computed_blocks
            table.prefix = prefix
        table.block_ids = computed_block_ids + self._take(num_new_blocks, table)
        self._tables[request_id] = table
        self._count_lookup(request_id, num_computed_blocks * self._block_size)
        return table.block_ids.copy()

    def _take(self, num_blocks: int, table: BlockTable) -> list[int]:
        self._found = [], ROOT
        return self._pool.take(num_blocks, table)

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise UnknownRequestError(request_id)
        return table
