"""Gives requests the blocks they need and finds the prefixes that others have left."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_kv_cache.block import BlockTable, check_sizes, num_blocks_for
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.errors import DuplicateRequestError, KVCacheIntegrityError, UnknownRequestError
from llmstack_kv_cache.stats import KVCacheStats
from llmstack_kv_cache.swap import HostBlockPool

_NO_LOOKUP = ("", 0)


class KVCacheManager:
    """Blocks of a paged KV cache, by request, with prefix caching.

    Knows block ids and token ids only; the tensors are somebody else's. Having no room is an answer (None), never an
    exception. Equal calls give equal answers: no clock, no randomness, no order of a set.

    Args:
        num_blocks: Blocks of the storage.
        block_size: Tokens per block.
        enable_prefix_caching: Whether anything is ever found.
        num_host_blocks: Blocks of the host storage, to which requests can be swapped out.
        num_reserved_blocks: Leading blocks that are never handed out (for padding rows, say).
        watermark: Share of the blocks that must be left free when a request begins or is swapped in; without effect
            while no other request holds blocks, so that what fits at all gets in.

    Raises:
        ValueError: A size that makes no sense; the text names the argument.
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
    ) -> None:
        check_sizes(num_blocks, block_size, num_host_blocks, num_reserved_blocks, watermark)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = watermark
        self._pool = BlockPool(num_blocks, block_size, num_reserved_blocks)
        self._host_pool = HostBlockPool(num_host_blocks)
        self._num_forks = 0
        self._prefix_index = self._pool.prefix_index
        self._tables: dict[str, BlockTable] = {}
        self._last_lookup = _NO_LOOKUP
        self._found: list[
            int
        ] = []  # by the last lookup, until blocks are taken: no need to look whether they still are
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use; the reserved ones are not among them."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references; cached ones count, since allocation may evict them."""
        return self._pool.num_free_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool, which swapped-out requests use; their ids are 0 to num_host_blocks - 1."""
        return self._host_pool.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of the host pool that no swapped-out request holds."""
        return self._host_pool.num_free_blocks

    @property
    def prefix_cache_queries(self) -> int:
        """Counter of tokens looked up, by requests that were then given blocks."""
        return self._num_queried_tokens

    @property
    def prefix_cache_hits(self) -> int:
        """Counter of tokens they found."""
        return self._num_hit_tokens

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest cached prefix of `token_ids` under `salt`: its block ids and its number of tokens.

        Whole blocks only, and never all tokens, so that one is left to compute. O(tokens found). Takes nothing: the
        blocks are safe until another request is given blocks.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return [], 0
        block_ids = self._prefix_index.find(token_ids, (len(token_ids) - 1) // self._block_size, salt)
        self._last_lookup = (request_id, len(token_ids))
        self._found = block_ids.copy()
        return block_ids, len(block_ids) * self._block_size

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """Makes room for the request's first `num_tokens` tokens; the block ids appended to its table, or None if full.

        A request that holds nothing begins with `computed_block_ids` (from `get_computed_blocks`), which are part of
        the answer. None changes nothing. O(blocks appended).

        Raises:
            ValueError: `num_tokens` is not positive; `computed_block_ids` are not findable, or the request has a table.
            DuplicateRequestError: The request is swapped out.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        table = self._tables.get(request_id)
        if table is None:
            return self._begin_table(request_id, num_tokens, list(computed_block_ids), salt)
        if computed_block_ids:
            raise ValueError(f"computed_block_ids: request_id {request_id[:64]!r} holds blocks already")
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
            ValueError: Fewer tokens or slots than `num_computed_tokens`, or a token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return
        table = self._table(request_id)
        num_full_blocks = num_computed_tokens // self._block_size
        first = table.num_cached_blocks
        if num_full_blocks <= first:
            return
        if num_full_blocks > len(table.block_ids) or num_computed_tokens > len(token_ids):
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is more than the request has")
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
        if not 1 <= num_tokens <= len(parent.block_ids) * self._block_size:
            raise ValueError(f"num_tokens {num_tokens} is not within the slots of {parent_id[:64]!r}")
        num_full_blocks, num_rest = divmod(num_tokens, self._block_size)
        num_copies = 1 if num_rest else 0
        if num_copies > self._pool.num_free_blocks:
            return None
        child = parent.fork(num_full_blocks)
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
        self.free(request_id)
        return copies

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Brings a request back; copies (host block, block) in the order of its new table, None if there is no room.

        The host blocks are free at once: in a step, all copies to the host come before those from it. None changes
        nothing.

        Raises:
            UnknownRequestError: The request is not in the host pool.
        """
        host_block_ids = self._host_pool.block_ids(request_id)
        if not self._admits(len(host_block_ids)):
            return None
        table = BlockTable(self._host_pool.release(request_id))
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

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing done, while a request holds blocks."""
        if self._tables:
            return False
        self._pool.forget_contents()
        return True

    def block_table(self, request_id: str) -> list[int]:
        """A copy of the request's block ids: token i lies in the one at index i // block_size.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        return self._table(request_id).block_ids.copy()

    def stats(self) -> KVCacheStats:
        """The cache at this moment."""
        return KVCacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self._prefix_index.num_findable,
            num_requests=len(self._tables),
            prefix_cache_queries=self._num_queried_tokens,
            prefix_cache_hits=self._num_hit_tokens,
            num_evictions=self._pool.num_evictions,
        )

    def check_integrity(self) -> None:
        """Recounts everything; O(number of blocks).

        Raises:
            KVCacheIntegrityError: The books do not agree.
        """
        tables = list(self._tables.values())
        problems = self._pool.inconsistencies(tables) + self._host_pool.inconsistencies()
        if any(self._pool.is_shared(b) for table in tables for b in table.block_ids[table.num_full_blocks :]):
            problems.append("a block that is still written has several owners")
        if not all(
            table.num_cached_blocks <= table.num_full_blocks <= len(table.block_ids) for table in self._tables.values()
        ):
            problems.append("a table has more cached blocks than blocks")
        if any(self._host_pool.holds(request_id) for request_id in self._tables):
            problems.append("a request is in both pools")
        if problems:
            raise KVCacheIntegrityError("; ".join(problems))

    def _begin_table(
        self, request_id: str, num_tokens: int, computed_block_ids: list[int], salt: str
    ) -> list[int] | None:
        if self._host_pool.holds(request_id):
            raise DuplicateRequestError(request_id)
        if computed_block_ids != self._found and not self._pool.are_findable(computed_block_ids):
            raise ValueError("computed_block_ids must be findable blocks, from get_computed_blocks")
        num_new_blocks = max(num_blocks_for(num_tokens, self._block_size) - len(computed_block_ids), 0)
        # Nothing needs to be counted where there is room even if all computed blocks are free ones.
        if not self._admits(num_new_blocks + len(computed_block_ids)) and not self._admits(
            num_new_blocks + self._pool.count_free(computed_block_ids)
        ):
            return None
        table = BlockTable(salt)
        if computed_block_ids:
            self._pool.share(computed_block_ids, table)
            table.num_cached_blocks = table.num_full_blocks = len(computed_block_ids)
            table.prefix = self._prefix_index.prefix(computed_block_ids[-1])
        table.block_ids = computed_block_ids + self._take(num_new_blocks, table)
        self._tables[request_id] = table
        self._count_lookup(request_id, len(computed_block_ids) * self._block_size)
        return table.block_ids.copy()

    def _take(self, num_blocks: int, table: BlockTable) -> list[int]:
        self._found = []
        return self._pool.take(num_blocks, table)

    def _admits(self, num_blocks: int) -> bool:
        num_kept_free = int(self._watermark * self._pool.num_blocks) if self._tables else 0
        return num_blocks + num_kept_free <= self._pool.num_free_blocks

    def _count_lookup(self, request_id: str, num_hit_tokens: int) -> None:
        # Only now: a request that waits for room is looked up again and again, and would count as often.
        looked_up_request_id, num_tokens = self._last_lookup
        if looked_up_request_id == request_id:
            self._num_queried_tokens += num_tokens
            self._num_hit_tokens += num_hit_tokens
        self._last_lookup = _NO_LOOKUP

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise UnknownRequestError(request_id)
        return table
