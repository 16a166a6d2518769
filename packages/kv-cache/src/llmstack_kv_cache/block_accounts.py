"""The base of the KV-cache manager: sizes, figures, events and books."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmstack_kv_cache.block import BlockTable, check_integer, check_sizes, num_blocks_for
from llmstack_kv_cache.block_pool import BlockPool
from llmstack_kv_cache.errors import KVCacheIntegrityError, UnknownRequestError
from llmstack_kv_cache.events import BlockStored, CompanionStored, EventLog, KVCacheEvent
from llmstack_kv_cache.groups import NULL_BLOCK_ID, KVCacheGroup, check_groups, interleave, leader_of
from llmstack_kv_cache.integrity import table_inconsistencies
from llmstack_kv_cache.lookup import NO_LOOKUP
from llmstack_kv_cache.prefix_walk import PrefixWalk
from llmstack_kv_cache.releases import SessionAccounts
from llmstack_kv_cache.session_ledger import NoSessions, SessionLedger
from llmstack_kv_cache.session_order import SessionOrder
from llmstack_kv_cache.states import EMPTY_STATE, RequestStates
from llmstack_kv_cache.stats import KVCacheStats
from llmstack_kv_cache.swap import HostBlockPool


class BlockAccounts(SessionAccounts):
    """The pools of a cache and the tables of its requests: sizes, figures, events and books.

    Args:
        num_blocks: Blocks of the storage.
        block_size: Tokens per block.
        enable_prefix_caching: Whether anything is ever found.
        groups: Groups of layers, with different names; by default one of full attention.
        num_state_blocks: Blocks of the storage of states, the empty state's included; 0 for a model without.
        num_host_blocks: Blocks of the host storage, to which requests can be swapped out.
        num_reserved_blocks: Leading blocks that are never handed out (for padding rows, say); None for as few as can
            be: the null block, unless there is one group of full attention.
        watermark: Share of the blocks that must be left free when a request begins or is swapped in; without effect
            while no other request holds blocks, so that what fits at all gets in.
        max_events: Events that are kept until they are fetched; with 0 there are none.
        knows_sessions: Evicts first what is least likely to be wanted soon, in place of the least recently used; for
            caches of one group without a window.

    Attributes:
        num_groups: Block ids that a table has for each block of tokens: one for each group.
        has_windows: Whether `advance` ever frees a block.
        has_states: Whether `advance_state` and `end_step` are to be called.
        num_host_blocks: Blocks of the host pool, which swapped-out requests use; their ids are 0 to this number - 1.
        prefix_cache_queries: Counter of tokens looked up, by requests that were then given blocks.
        prefix_cache_hits: Counter of tokens they found.
        prefix_tokens_without_state: Counter of tokens that were found, but are computed again for want of a state.
        sessions: What is known of sessions; its user tells it of the time, and of requests that begin and end.
        num_known_tokens: Tokens that the last lookup would have found if states were at every boundary.

    Raises:
        ValueError: A size or the groups make no sense; the text names the argument.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup("full"),),
        num_state_blocks: int = 0,
        num_host_blocks: int = 0,
        num_reserved_blocks: int | None = None,
        watermark: float = 0.0,
        max_events: int = 0,
        knows_sessions: bool = False,
    ) -> None:
        self._is_plain = len(groups) == 1 and groups[0].sliding_window is None
        if num_reserved_blocks is None:
            num_reserved_blocks = 0 if self._is_plain else 1
        check_sizes(num_blocks, block_size, num_host_blocks, num_reserved_blocks, watermark, max_events)
        check_groups(groups, num_reserved_blocks)
        if knows_sessions and not self._is_plain:
            raise ValueError("knows_sessions needs one group of layers, without a window")
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._watermark = watermark
        self._events = EventLog(max_events) if max_events else None
        self._order = SessionOrder(block_size) if knows_sessions else None
        self._ledger = self._order or (SessionLedger(block_size) if enable_prefix_caching else None)
        self.sessions = self._ledger or NoSessions()
        self._pool = BlockPool(num_blocks, block_size, num_reserved_blocks, self._events, self._order, self._ledger)
        self._prefix_index, self._host_pool = self._pool.prefix_index, HostBlockPool(num_host_blocks)
        self._states = RequestStates(num_state_blocks, self._prefix_index, block_size) if num_state_blocks else None
        self._groups = tuple(groups)
        self._leader = leader_of([group.sliding_window for group in groups])
        self._companions = [number for number in range(len(groups)) if number != self._leader]
        self._prefix_index.group = self._leader if len(groups) > 1 or num_state_blocks else None
        self._prefix_index.state_group = len(groups)
        self._tables: dict[str, BlockTable] = {}  # the leader's, with those of the other groups
        self._swapped: dict[str, list[tuple[int, int]]] = {}  # passed and held blocks of each group
        self._walks: dict[str, PrefixWalk] = {}  # lookups that take several steps
        self._lookup = NO_LOOKUP  # the last one, until blocks are taken or forgotten
        self._num_forks = 0
        # Attributes and no properties: every step reads them.
        self.num_groups = len(groups)
        self.has_windows = any(group.sliding_window is not None for group in groups)
        self.has_states = self._states is not None
        self.num_host_blocks = num_host_blocks
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.prefix_tokens_without_state = self.num_known_tokens = 0

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

    def look_ahead(self, request_id: str, token_ids: Sequence[int], max_num_blocks: int, salt: str = "") -> int:
        """Goes on with a lookup that takes several steps; how many blocks it has found now.

        Fewer than `max_num_blocks` say that nothing further is known at the moment. `get_computed_blocks` begins where
        this ends, until the request holds blocks or is freed. Blocks that it has found may be evicted in the meantime.
        O(max_num_blocks).

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return 0
        if (walk := self._walks.get(request_id)) is None:
            walk = self._walks[request_id] = PrefixWalk(self._prefix_index)
        return walk.go_on(token_ids, max_num_blocks, salt)

    def block_table(self, request_id: str) -> list[int]:
        """A copy of the request's block ids, interleaved; the null block where a window has passed."""
        return interleave(self.block_tables(request_id))

    def block_tables(self, request_id: str) -> list[list[int]]:
        """The request's block ids by group: token i lies in the one at index i // block_size."""
        tables = self._by_group(self._table(request_id))
        return [[NULL_BLOCK_ID] * table.num_passed_blocks + table.block_ids for table in tables]

    def num_blocks_needed(self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int) -> int:
        """Most blocks that a request holds at once while it grows from `num_computed_tokens` to `num_tokens`.

        It computes at most `max_num_step_tokens` in one step, before which its windows are advanced.
        """
        if not self.has_windows:
            return num_blocks_for(num_tokens, self.block_size) * self.num_groups
        numbers = num_tokens, num_computed_tokens, max_num_step_tokens, self.block_size
        return sum(group.num_blocks_needed(*numbers) for group in self._groups)

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds and that are free once it gives them up; 0 if it holds none.

        A block of a window counts only while the request is its one owner: given up by one owner, a block of
        several is not free. Blocks of full attention all count, since they are never given up before the end.
        """
        table = self._tables.get(request_id)
        tables = [] if table is None else self._by_group(table)
        windows = [one for one, group in zip(tables, self._groups, strict=False) if group.sliding_window is not None]
        num_shared = sum(self._pool.is_shared(block_id) for one in windows for block_id in one.block_ids)
        return sum(len(one.block_ids) for one in tables) - num_shared

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """Whether a fork can go on from the request's first `num_tokens` tokens: states and windows are kept there."""
        table = self._table(request_id)
        if self._states is not None and self._states.after(request_id, num_tokens) is None:
            return False
        return not self.has_windows or all(
            one.num_passed_blocks <= group.first_needed_block(num_tokens, self.block_size)
            for group, one in zip(self._groups, self._by_group(table), strict=True)
        )

    def known_prefix(self, block_ids: list[int], token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The blocks of a found prefix, the leader's passed ones too, up to a known state, if any are; its block."""
        leader, num_blocks, state = self._leader, len(block_ids) // self.num_groups, EMPTY_STATE
        if self._states is not None:
            state = self._states.find(block_ids[leader :: self.num_groups], num_blocks)
            num_blocks = state.num_tokens // self.block_size
        known = block_ids[: num_blocks * self.num_groups]
        if self._groups[leader].sliding_window is not None:
            known[leader :: self.num_groups], _ = self._prefix_index.find(token_ids, num_blocks, salt)
        return known, state.block_id

    def contents(self, block_ids: Iterable[int]) -> list[int]:
        """The content of each block as a number that no other prefix ever has; 0 where nothing finds the block.

        So the blocks of a prefix that was looked up once are known to be its blocks still. O(blocks).
        """
        return self._prefix_index.identities(block_ids)

    def end_step(self) -> None:
        """Ends the making of a step: the next one may read the states that this one writes."""
        if self._states is not None:
            self._lookup = NO_LOOKUP  # the state that it has found may have been replaced
            self._states.end_step()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing done, while a request holds blocks."""
        if self._tables:
            return False
        self._lookup = NO_LOOKUP
        self._walks.clear()
        if self._states is not None:
            self._states.pool.forget_contents()
        self._pool.forget_contents()
        if self._ledger is not None:
            self._ledger.reset()
        return True

    def forget_prefix(self, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        """Makes what follows the first `num_tokens` tokens of `token_ids` unfindable: who was to write it has failed.

        Requests that hold the blocks keep them. O(tokens found).

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        self._lookup = NO_LOOKUP
        block_ids, _ = self._prefix_index.find(token_ids, len(token_ids) // self.block_size, salt)
        self._prefix_index.evict(block_ids[num_tokens // self.block_size :])

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
        self._lookup = NO_LOOKUP
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

    def stored(self) -> Iterator[BlockStored | CompanionStored]:
        """Everything that can be found, or is chained to what could be, as events; parents come first."""
        return self._prefix_index.stored(() if self._states is None else self._states.pool.identities)

    def stats(self) -> KVCacheStats:
        """The cache at this moment."""
        pool, host, states = self._pool, self._host_pool, None if self._states is None else self._states.pool
        return KVCacheStats(
            pool.num_blocks, pool.num_free_blocks, self._prefix_index.num_findable, len(self._tables),
            self.prefix_cache_queries, self.prefix_cache_hits, pool.num_evictions,
            host.num_blocks, host.num_free_blocks, host.num_swap_outs, host.num_swap_ins, self._num_forks,
            states.num_blocks if states else 0, states.num_free_blocks if states else 0,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Recounts everything; O(number of blocks).

        Raises:
            KVCacheIntegrityError: The books do not agree.
        """
        problems = table_inconsistencies(map(self._by_group, self._tables.values()), self._groups, self._pool)
        problems += self._host_pool.inconsistencies()
        if self._swapped.keys() & self._tables.keys() or list(self._swapped) != self._host_pool.request_ids:
            problems.append("a request is in both pools, or in none")
        if self._states is not None:
            problems += self._states.inconsistencies(self._tables.keys() | self._swapped.keys())
        if problems:
            raise KVCacheIntegrityError("; ".join(problems))

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise UnknownRequestError(request_id)
        return table

    def _has_room_for_states(self) -> bool:
        return self._states is None or self._states.has_room()

    def _by_group(self, table: BlockTable) -> list[BlockTable]:
        """The tables of a request, in the order of the groups; `table` is the leader's."""
        if not table.companions:
            return [table]
        return [*table.companions[: self._leader], table, *table.companions[self._leader :]]
