"""The KV-cache manager: blocks of requests, and prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_kv_cache.block import BlockTable, check_integer, num_blocks_for
from llmstack_kv_cache.block_accounts import BlockAccounts
from llmstack_kv_cache.common_prefix import CommonPrefix
from llmstack_kv_cache.errors import DuplicateRequestError, shown
from llmstack_kv_cache.groups import NEVER, NULL_BLOCK_ID, interleave
from llmstack_kv_cache.lookup import NO_LOOKUP
from llmstack_kv_cache.prefix_index import ROOT, Prefix
from llmstack_kv_cache.session_turns import Segment
from llmstack_kv_cache.state_pool import EMPTY_STATE_ID
from llmstack_kv_cache.states import EMPTY_STATE


class KVCacheManager(BlockAccounts):
    """Blocks of a paged KV cache, by request, with prefix caching.

    Knows block ids and token ids only; the tensors belong to the caller. Having no room is an answer (None), never an
    exception, and changes nothing. Equal calls give equal answers: no clock, no randomness, no order of a set. The
    arguments are those of `BlockAccounts`. Methods but `free` and `num_held_blocks` raise `UnknownRequestError` for a
    request that holds no blocks, or is not in the host pool.

    A request has a block table in each group of layers, over one pool. Lists of block ids are interleaved: token i lies
    in the block at index i // block_size * num_groups + group. Prefixes are known by the blocks of the leader, the
    first group without a window, or the first of all; the blocks of other groups are found by the leader's content.

    Layers with a state have one block per state, of a pool of its own. A step reads one state block and writes another,
    which only later steps find. Which states are worth keeping, the caller says.
    """

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest prefix of `token_ids` under `salt` that is cached: its block ids, and its tokens with a state.

        Whole blocks only, and never all tokens, so that one is left to compute; the null block where a window needs
        none. Blocks beyond the last state are for reading: what they hold is computed again, but not written.
        O(tokens found beyond `look_ahead`). Takes nothing: the blocks are safe until a call that changes the cache.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        if not self._enable_prefix_caching:
            return [], 0
        max_blocks = (len(token_ids) - 1) // self.block_size
        finder = self._walks.get(request_id, self._prefix_index)
        block_ids, prefix = finder.find(token_ids, max_blocks, salt)
        num_tokens, state, ends = len(block_ids) * self.block_size, EMPTY_STATE, tuple[int, ...]()
        if self._is_plain and self._states is not None:
            self.num_known_tokens, state = num_tokens, self._states.find(block_ids, len(block_ids))
            num_tokens = state.num_tokens
        elif not self._is_plain:
            ends = len(block_ids), max_blocks
            common = CommonPrefix(self._prefix_index, self._groups, self._leader, block_ids, self.block_size)
            num_known, num_hits, state = common.longest_with_state(self._states)
            self.num_known_tokens, num_tokens = num_known * self.block_size, num_hits * self.block_size
            # Further on than its state, a request might hold more of a window than `num_blocks_needed` says.
            num_shared = num_hits if self.has_windows else num_known
            prefix = self._prefix_index.prefix(block_ids[num_shared - 1]) if num_shared else ROOT
            block_ids = interleave(common.block_ids(num_shared))
        self._lookup = request_id, len(token_ids), block_ids.copy(), prefix, state, ends
        return block_ids, num_tokens

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """Makes room for the request's first `num_tokens` tokens; the block ids its table gains, or None if full.

        A request that holds nothing begins with `computed_block_ids`, as the last lookup gave them, which are part of
        the answer; with the state that was found; and with room for its two state blocks. O(blocks appended).

        Raises:
            ValueError: `num_tokens` is no positive integer; `computed_block_ids` are not those of the last
                `get_computed_blocks`, or blocks were taken or forgotten since, or the request has a table.
            DuplicateRequestError: The request is swapped out.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            check_integer("num_tokens", num_tokens, 1)
        self._pool.taker = request_id
        if (table := self._tables.get(request_id)) is None:
            return self._begin(request_id, num_tokens, list(computed_block_ids), salt)
        if computed_block_ids:
            raise ValueError(f"computed_block_ids: request_id {shown(request_id)} holds blocks already")
        if num_tokens <= table.num_blocks * self.block_size:
            return []
        num_new_blocks = num_blocks_for(num_tokens, self.block_size) - table.num_blocks
        if num_new_blocks * self.num_groups > self._pool.num_free_blocks:
            return None
        if not table.companions:
            return self._append(table, num_new_blocks)
        return interleave([self._append(one, num_new_blocks) for one in self._by_group(table)])

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the request's full blocks below `num_computed_tokens` findable; `token_ids` are its tokens.

        May be called before the blocks are filled, if every reader runs after, or together with, the step that fills
        them. A state at a boundary becomes findable once it is written. O(tokens that became findable).

        Raises:
            ValueError: `num_computed_tokens` is negative, or more than the tokens or slots; a token id is over 32 bits.
        """
        table = self._table(request_id)
        if type(num_computed_tokens) is not int:
            check_integer("num_computed_tokens", num_computed_tokens, 0)
        if not 0 <= num_computed_tokens <= min(len(token_ids), table.num_blocks * self.block_size):
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is not within what the request has")
        if self._enable_prefix_caching and num_computed_tokens // self.block_size > table.num_cached_blocks:
            self._insert(table, token_ids, num_computed_tokens // self.block_size)
        if self._states is not None:
            self._lookup = NO_LOOKUP
            self._states.note_boundary(request_id, table)

    def advance(self, request_id: str, num_computed_tokens: int, *, keeps_leader: bool = False) -> int:
        """Frees the blocks, unless `keeps_leader` the leader's too, that no token from `num_computed_tokens` on sees.

        The step that computes the tokens before it has run, or runs before any step that is given blocks from now on.
        Returns the number of computed tokens from which on another block can be freed.

        Raises:
            ValueError: `num_computed_tokens` is not within the request's slots.
        """
        table = self._table(request_id)
        check_integer("num_computed_tokens", num_computed_tokens, 0)
        if num_computed_tokens > table.num_blocks * self.block_size:
            raise ValueError(f"num_computed_tokens {num_computed_tokens} is not within what the request has")
        for group, one in zip(self._groups, self._by_group(table), strict=True):
            if not (keeps_leader and one is table):
                self._release_passed(one, group.first_needed_block(num_computed_tokens, self.block_size))
        return min(group.next_passed_token(num_computed_tokens, self.block_size) for group in self._groups)

    def advance_state(
        self, request_id: str, num_tokens: int, *, is_kept: bool = True, replaces_last: bool = False
    ) -> tuple[int, int]:
        """The state blocks that the request's row of this step reads and writes; the empty state, without states.

        Called once per row. The row writes the state after the request's first `num_tokens` tokens, whatever drafts
        follow them. What it read in its step before is given back.

        Args:
            request_id: A request that holds blocks.
            num_tokens: More than in its step before.
            is_kept: The state may be found later, if it is at a block boundary.
            replaces_last: The last state that was kept so is then no longer found, unless a lookup has found it.

        Raises:
            ValueError: `num_tokens` is not more than before.
        """
        if self._states is None:
            return EMPTY_STATE_ID, EMPTY_STATE_ID
        self._lookup = NO_LOOKUP  # the state that it has found may be the one that is taken
        return self._states.advance(request_id, num_tokens, self._table(request_id), is_kept, replaces_last)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child_id` the parent's first `num_tokens` tokens; block copies (source, destination), None if full.

        Full blocks and the state are shared; a last block that is begun is copied, so that no block is ever written by
        two. The copy is the caller's to perform before either request writes again.

        Raises:
            DuplicateRequestError: The child holds blocks already, here or in the host pool.
            ValueError: `num_tokens` is not within the parent's slots; it has no state there, or a window has passed it.
        """
        parent = self._table(parent_id)
        if child_id in self._tables or child_id in self._swapped:
            raise DuplicateRequestError(child_id)
        check_integer("num_tokens", num_tokens, 1)
        if num_tokens > parent.num_blocks * self.block_size:
            raise ValueError(f"num_tokens {num_tokens} is not within the slots of {shown(parent_id)}")
        state = EMPTY_STATE if self._states is None else self._states.after(parent_id, num_tokens)
        if state is None:
            raise ValueError(f"num_tokens {num_tokens} is where the parent holds no state")
        if not self.keeps_prefix(parent_id, num_tokens):
            raise ValueError(f"num_tokens {num_tokens} needs blocks that a window has passed")
        num_full_blocks, num_copies = num_tokens // self.block_size, int(num_tokens % self.block_size > 0)
        if num_copies * self.num_groups > self._pool.num_free_blocks or not self._has_room_for_states():
            return None
        copies: list[tuple[int, int]] = []
        tables = []
        for one in self._by_group(parent):
            child = one.fork(num_full_blocks)
            self._pool.share(child.block_ids, child)
            copies += zip(one.block_ids[len(child.block_ids) :], self._append(child, num_copies), strict=False)
            tables.append(child)
        self._hold(child_id, tables)
        if self._states is not None:
            self._states.begin(child_id, state)
        self._num_forks += 1
        return copies

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Moves the request to the host pool; copies (block, host block) for the caller to perform, None if no room.

        The blocks are free at once, so the copies come before anything else is written. The request keeps one state
        block; None too where all of them would be kept so.
        """
        tables = self._by_group(self._table(request_id))
        if not self._has_room_for_states():
            return None
        block_ids = _all_block_ids(tables)
        if (host_block_ids := self._host_pool.take(request_id, len(block_ids), tables[0].salt)) is None:
            return None
        copies = list(zip(block_ids, host_block_ids, strict=True))
        self._swapped[request_id] = [(one.num_passed_blocks, len(one.block_ids)) for one in tables]
        self._release(self._tables.pop(request_id))
        if self._states is not None:
            self._states.drop_previous(request_id)
        return copies

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Swaps a request in; copies (host block, block) in the order of its new tables, None if there is no room.

        The host blocks are free at once: in a step, all copies to the host come before those from it.
        """
        if not self._admits(len(host_block_ids := self._host_pool.block_ids(request_id))):
            return None
        tables = self._new_tables(self._host_pool.swap_in(request_id), [], ROOT, ())
        for table, (num_passed_blocks, num_blocks) in zip(tables, self._swapped.pop(request_id), strict=True):
            table.num_blocks = num_passed_blocks
            self._append(table, num_blocks)
        self._hold(request_id, tables)
        return list(zip(host_block_ids, _all_block_ids(tables), strict=True))

    def free(self, request_id: str) -> None:
        """Drops the request's references, last block first: the head of a prefix is evicted last. Idempotent.

        What was cached stays findable, its states too. A swapped-out request gives its host blocks back.
        """
        self._walks.pop(request_id, None)
        if (table := self._tables.pop(request_id, None)) is not None:
            final = self._ledger and self._ledger.free(table)
            self._release(table)
            if final:
                self._give_up(final)
        elif self._swapped.pop(request_id, None) is not None:
            self._host_pool.release(request_id)
        else:
            return
        if self._states is not None:
            self._states.free(request_id)

    def _begin(self, request_id: str, num_tokens: int, computed: list[int], salt: str) -> list[int] | None:
        if request_id in self._swapped:
            raise DuplicateRequestError(request_id)
        looked_up_id, num_looked_up, found, prefix, state, ends = self._lookup
        if not computed:
            prefix, state = ROOT, EMPTY_STATE
        elif computed != found:
            raise ValueError("computed_block_ids must be those of the last get_computed_blocks, not forgotten since")
        num_found = len(computed) // self.num_groups
        num_new_blocks = max(num_blocks_for(num_tokens, self.block_size) - num_found, 0)
        if not self._has_room_to_begin(num_new_blocks * self.num_groups, computed):
            return None
        tables = self._new_tables(salt, computed, prefix, ends if looked_up_id == request_id else ())
        for table in tables:
            self._append(table, num_new_blocks)
        self._hold(request_id, tables)
        num_hits = num_found * self.block_size
        if self._states is not None:
            self._states.begin(request_id, state, is_found=True)
            num_hits = state.num_tokens
        # Only now: a request that waits for room is looked up again and again, and would count as often.
        if looked_up_id == request_id:
            self.prefix_cache_queries += num_looked_up
            self.prefix_cache_hits += num_hits
            if self.has_states:
                self.prefix_tokens_without_state += self.num_known_tokens - num_hits
        return tables[0].block_ids.copy() if self._is_plain else self.block_table(request_id)

    def _has_room_to_begin(self, num_new_blocks: int, computed: list[int]) -> bool:
        """Whether a request that begins may take new blocks, and of the computed ones those that are free."""
        if self._states is not None and not self._states.has_room():
            return False
        # Nothing needs to be counted where there is room even if all computed blocks are free ones.
        if self._admits(num_new_blocks + len(computed)):
            return True
        held = computed if self._is_plain else [block_id for block_id in computed if block_id != NULL_BLOCK_ID]
        return self._admits(num_new_blocks + self._pool.count_free(held))

    def _new_tables(self, salt: str, computed: list[int], prefix: Prefix, ends: Sequence[int]) -> list[BlockTable]:
        """Tables that begin with what a lookup has found.

        They know which blocks lookups are likely to want after a window has passed them: those found, those that a
        prefix of as many blocks as one of `ends` needs, and all of the leader's, on which the prefixes hang.
        """
        num_found = len(computed) // self.num_groups
        if self._is_plain:
            tables = [BlockTable(salt, computed, num_found)]
        else:
            tables = []
            for number, group in enumerate(self._groups):
                block_ids = [block_id for block_id in computed[number :: self.num_groups] if block_id != NULL_BLOCK_ID]
                useful = [range(group.first_of_prefix(end, self.block_size), end) for end in ends]
                useful.append(range(NEVER if number == self._leader else num_found))
                tables.append(BlockTable(salt, block_ids, num_found, tuple(useful)))
        if num_found:
            for table in tables:
                self._pool.share(table.block_ids, table)
            tables[self._leader].num_cached_blocks, tables[self._leader].prefix = num_found, prefix
        return tables

    def _hold(self, request_id: str, tables: list[BlockTable]) -> None:
        leader = self._tables[request_id] = tables[self._leader]
        self._walks.pop(request_id, None)
        if not self._is_plain:
            leader.companions = tuple(tables[number] for number in self._companions)

    def _append(self, table: BlockTable, num_blocks: int) -> list[int]:
        self._lookup = NO_LOOKUP
        block_ids = self._pool.take(num_blocks, table)
        table.block_ids += block_ids
        table.num_blocks += num_blocks
        return block_ids

    def _insert(self, table: BlockTable, token_ids: Sequence[int], end: int) -> None:
        """Makes the request's blocks findable that are not yet, up to `end`, unless a window has passed the first."""
        first = table.num_cached_blocks
        start = first - table.num_passed_blocks
        if start < 0:
            return
        block_ids, before = table.block_ids[start : start + end - first], table.block_ids[start - 1] if start else None
        is_shared = first < table.num_full_blocks
        stored, table.prefix = self._prefix_index.insert(
            block_ids, token_ids, table.prefix, before, first, table.salt, may_be_findable=is_shared
        )
        if stored != block_ids:
            table.copies += [mine for mine, other in zip(block_ids, stored, strict=True) if mine != other]
        table.num_cached_blocks = end
        table.num_full_blocks = max(table.num_full_blocks, end)
        if table.companions:
            self._lookup = NO_LOOKUP
            self._insert_companions(table, first, self._prefix_index.identities(stored))

    def _insert_companions(self, leader: BlockTable, first: int, identities: list[int]) -> None:
        for number, table in zip(self._companions, leader.companions, strict=True):
            table.num_full_blocks = max(table.num_full_blocks, leader.num_cached_blocks)
            start = first - table.num_passed_blocks
            block_ids = table.block_ids[max(start, 0) : start + len(identities)]
            self._prefix_index.insert_companions(block_ids, identities[max(-start, 0) :], number)

    def _release_passed(self, table: BlockTable, first_needed: int) -> None:
        num_passed_blocks = first_needed - table.num_blocks + len(table.block_ids)
        if num_passed_blocks > 0:
            useful, others = table.pass_blocks(num_passed_blocks)
            self._pool.release(Segment(useful))
            self._pool.release_useless(Segment(others))

    def _release(self, table: BlockTable) -> None:
        """Frees all blocks; what a lookup of the whole request would not want counts as passed."""
        if self._is_plain:
            self._pool.release(table, table.copies + table.block_ids[table.num_cached_blocks :])
            return
        for group, one in zip(self._groups, self._by_group(table), strict=True):
            self._release_passed(one, group.first_needed_block(one.num_full_blocks * self.block_size, self.block_size))
            self._pool.release(one)
        table.companions = ()

    def _admits(self, num_blocks: int) -> bool:
        """Whether a request that begins may take so many free blocks."""
        num_kept_free = int(self._watermark * self._pool.num_blocks) if self._tables else 0
        return num_blocks + num_kept_free <= self._pool.num_free_blocks


def _all_block_ids(tables: list[BlockTable]) -> list[int]:
    return tables[0].block_ids if len(tables) == 1 else [block_id for one in tables for block_id in one.block_ids]
