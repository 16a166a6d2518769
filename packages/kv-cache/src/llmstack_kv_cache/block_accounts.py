"""The base of all KV-cache managers: sizes, figures, events and checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from llmstack_kv_cache.block import BlockTable, check_integer, check_sizes, num_blocks_for
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.errors import KVCacheIntegrityError
from llmstack_kv_cache.events import BlockStored, EventLog, KVCacheEvent
from llmstack_kv_cache.prefix_index import ROOT, Prefix
from llmstack_kv_cache.state_pool import EMPTY_STATE_ID
from llmstack_kv_cache.stats import KVCacheStats
from llmstack_kv_cache.swap import HostBlockPool

_NO_LOOKUP = ("", 0)


class BlockAccounts(ABC):
    """One pool of blocks and one of host blocks: their sizes, figures, events and books.

    Args:
        num_blocks: Blocks of the storage.
        block_size: Tokens per block.
        enable_prefix_caching: Whether anything is ever found.
        num_host_blocks: Blocks of the host storage, to which requests can be swapped out.
        num_reserved_blocks: Leading blocks that are never handed out (for padding rows, say).
        watermark: Share of the blocks that must be left free when a request begins or is swapped in; without effect
            while no other request holds blocks, so that what fits at all gets in.
        max_events: Events that are kept until they are fetched; with 0 there are none.

    Attributes:
        num_host_blocks: Blocks of the host pool, which swapped-out requests use; their ids are 0 to this number - 1.
        prefix_cache_queries: Counter of tokens looked up, by requests that were then given blocks.
        prefix_cache_hits: Counter of tokens they found.
        prefix_tokens_without_state: Counter of tokens that were found, but are computed again for want of a state.
        num_known_tokens: Tokens that the last lookup would have found if states were at every boundary.

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
        max_events: int = 0,
    ) -> None:
        check_sizes(num_blocks, block_size, num_host_blocks, num_reserved_blocks, watermark, max_events)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = watermark
        self._events = EventLog(max_events) if max_events else None
        self._pool = BlockPool(num_blocks, block_size, num_reserved_blocks, self._events)
        self._prefix_index = self._pool.prefix_index
        self._host_pool = HostBlockPool(num_host_blocks)
        self._last_lookup = _NO_LOOKUP
        # By the last lookup, until blocks are taken or forgotten: a table that begins so needs no further check.
        self._found: tuple[list[int], Prefix] = ([], ROOT)
        self.num_host_blocks = num_host_blocks
        # Attributes and no properties: every step reads them.
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.prefix_tokens_without_state = self.num_known_tokens = 0
        self._num_forks = 0

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use; the reserved ones are not among them."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request references; cached ones count, since allocation may evict them."""
        return self._pool.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of the host pool that no swapped-out request holds."""
        return self._host_pool.num_free_blocks

    @property
    def num_groups(self) -> int:
        """Block ids that a table has for each block of tokens: one for each group of layers."""
        return 1

    @property
    def has_windows(self) -> bool:
        """Whether `advance` ever frees a block."""
        return False

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with a state, so that `advance_state` and `end_step` are to be called."""
        return False

    def advance_state(
        self, request_id: str, num_tokens: int, *, is_kept: bool = True, replaces_last: bool = False
    ) -> tuple[int, int]:
        """The state blocks that a row reads and writes: the empty state, without states."""
        return EMPTY_STATE_ID, EMPTY_STATE_ID

    def known_state(self, block_ids: Sequence[int]) -> tuple[int, int]:
        """How many of the blocks of a prefix end with a known state, and that state's block; all, without states."""
        return len(block_ids) // self.num_groups, EMPTY_STATE_ID

    def end_step(self) -> None:  # noqa: B027 - most caches have no states
        """Ends the making of a step: nothing to do without states."""

    def num_blocks_needed(self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int) -> int:
        """Most blocks that a request holds at once while it grows from `num_computed_tokens` to `num_tokens`.

        `max_num_step_tokens`: Most tokens that it computes in one step.
        """
        return num_blocks_for(num_tokens, self._block_size)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing done, while a request holds blocks."""
        if any(True for _ in self._held_tables()):
            return False
        self._found = [], ROOT
        self._pool.forget_contents()
        return True

    def forget_prefix(self, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        """Makes what follows the first `num_tokens` tokens of `token_ids` unfindable: who was to write it has failed.

        Requests that hold the blocks keep them. O(tokens found).

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        self._found = [], ROOT
        block_ids, _ = self._prefix_index.find(token_ids, len(token_ids) // self._block_size, salt)
        self._prefix_index.evict(block_ids[num_tokens // self._block_size :])

    def resize(self, num_blocks: int) -> bool:
        """Changes the number of blocks of the storage; False, with nothing done, if a block that would go is held.

        The blocks with the highest ids come and go; what can be found in those that go is evicted. O(all blocks).

        Raises:
            ValueError: `num_blocks` leaves none besides the reserved ones.
        """
        check_integer("num_blocks", num_blocks, 1)
        num_reserved_blocks = self._pool.num_reserved_blocks
        if num_blocks <= num_reserved_blocks:
            raise ValueError(f"num_blocks must be more than the {num_reserved_blocks} reserved, got {num_blocks}")
        self._found = [], ROOT
        return self._pool.resize(num_blocks)

    def fetch_events(self) -> tuple[list[KVCacheEvent], int]:
        """The events since the last call, and the number of earlier events that were dropped.

        After a number above 0 the listener's picture is incomplete: removals of blocks it does not know, stores after
        parents it does not know.
        """
        return self._events.fetch() if self._events is not None else ([], 0)

    def start_events(self, max_events: int) -> None:
        """Begins to note events, unless it does already; `stored` is what can be found at this moment.

        Raises:
            ValueError: `max_events` is not positive.
        """
        check_integer("max_events", max_events, 1)
        if self._events is None:
            self._events = self._prefix_index.events = EventLog(max_events)

    def stored(self) -> Iterator[BlockStored]:
        """Everything that can be found, or is chained to what could be, as events; parents come first."""
        return self._prefix_index.stored()

    def stats(self) -> KVCacheStats:
        """The cache at this moment."""
        return KVCacheStats(
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self._prefix_index.num_findable,
            num_requests=self._num_requests(),
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_evictions=self._pool.num_evictions,
            num_host_blocks=self.num_host_blocks,
            num_free_host_blocks=self.num_free_host_blocks,
            num_swap_outs=self._host_pool.num_swap_outs,
            num_swap_ins=self._host_pool.num_swap_ins,
            num_forks=self._num_forks,
        )

    def check_integrity(self) -> None:
        """Recounts everything; O(number of blocks).

        Raises:
            KVCacheIntegrityError: The books do not agree.
        """
        tables = list(self._held_tables())
        problems = self._pool.inconsistencies(tables) + self._host_pool.inconsistencies()
        if any(self._pool.is_shared(block_id) for table in tables for block_id in table.writable):
            problems.append("a block that is still written has several owners")
        if not all(table.num_cached_blocks <= table.num_full_blocks <= table.num_blocks for table in tables):
            problems.append("a table has more cached or full blocks than blocks")
        problems += self._request_problems()
        if problems:
            raise KVCacheIntegrityError("; ".join(problems))

    @abstractmethod
    def _held_tables(self) -> Iterable[BlockTable]:
        """All tables whose blocks are held."""

    @abstractmethod
    def _num_requests(self) -> int:
        """Requests that hold blocks."""

    @abstractmethod
    def _request_problems(self) -> list[str]:
        """Invariants of the requests' own accounts that do not hold."""

    def _admits(self, num_blocks: int, is_first: bool) -> bool:
        num_kept_free = 0 if is_first else int(self._watermark * self._pool.num_blocks)
        return num_blocks + num_kept_free <= self._pool.num_free_blocks

    def _note_lookup(self, request_id: str, num_tokens: int) -> None:
        self._last_lookup = (request_id, num_tokens)

    def _count_lookup(self, request_id: str, num_hit_tokens: int) -> None:
        # Only now: a request that waits for room is looked up again and again, and would count as often.
        looked_up_request_id, num_tokens = self._last_lookup
        if looked_up_request_id == request_id:
            self.prefix_cache_queries += num_tokens
            self.prefix_cache_hits += num_hit_tokens
        self._last_lookup = _NO_LOOKUP
