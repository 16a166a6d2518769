"""The manager of a cache that holds states beside keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llmstack_kv_cache.block import check_integer
from llmstack_kv_cache.errors import UnknownRequestError
from llmstack_kv_cache.kv_cache_manager import KVCacheManager
from llmstack_kv_cache.state_pool import EMPTY_STATE_ID, StatePool

_BLOCKS_PER_REQUEST = 2


class _State:
    """A state block of a request.

    Attributes:
        num_tokens: Tokens of the request after which it is the state.
        step: The step that writes it.
        is_kept: Whether it is to be found at a block boundary.
        replaces_last: Whether it is found in place of the last such state of the request.
    """

    __slots__ = ("block_id", "is_kept", "num_tokens", "replaces_last", "step")

    def __init__(self, block_id: int, num_tokens: int, step: int, is_kept: bool, replaces_last: bool) -> None:
        self.block_id = block_id
        self.num_tokens = num_tokens
        self.step = step
        self.is_kept = is_kept
        self.replaces_last = replaces_last


class _StateTable:
    """The live state blocks of a request, at most two.

    Attributes:
        current: The state that its next step begins with.
        previous: The state that its last step began with; None once it is given back.
        last_kept: Block and identity of the last state that was found in place of an older one.
    """

    __slots__ = ("current", "last_kept", "previous")

    def __init__(self, current: _State) -> None:
        self.current = current
        self.previous: _State | None = None
        self.last_kept: tuple[int, int] | None = None

    @property
    def states(self) -> list[_State]:
        """Its live states, the older one first."""
        return [self.current] if self.previous is None else [self.previous, self.current]


class StateKVCacheManager(KVCacheManager):
    """Like `KVCacheManager`, for a model that also has layers with a recurrent state.

    Such a layer does not keep a row per token but one state, which every token changes. All state layers together have
    one block per state, of a pool of its own with ids of its own. Four rules make a state as safe to share as keys and
    values are:

    - A step reads one state block and writes another one, so it can be computed again. A request holds two at most.
    - A state is found only by the steps after the one that writes it.
    - It is found by the content of its prefix, at a block boundary.
    - A prefix is found up to the longest boundary that has a state; there may be none at the boundaries before it.
      Blocks of keys and values that are found beyond it are shared too. What they hold is computed again, for the
      states, but not written: it would be equal.

    The caller says which states are worth keeping. A request that is swapped out keeps its state block on the device.

    Args:
        num_blocks: Blocks of the storage of keys and values.
        num_state_blocks: Blocks of the storage of states. Block 0 of them is the state before the first token.

    The other arguments are those of `KVCacheManager`.

    Raises:
        ValueError: A size makes no sense; the text names the argument.
    """

    def __init__(
        self,
        num_blocks: int,
        num_state_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        *,
        num_host_blocks: int = 0,
        num_reserved_blocks: int = 0,
        watermark: float = 0.0,
        max_events: int = 0,
    ) -> None:
        check_integer("num_state_blocks", num_state_blocks, 1 + _BLOCKS_PER_REQUEST)
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            num_reserved_blocks=num_reserved_blocks,
            watermark=watermark,
            max_events=max_events,
        )
        self._states = StatePool(num_state_blocks)
        self._state_tables: dict[str, _StateTable] = {}
        self._pending: list[tuple[_StateTable, _State, int]] = []  # written by the step being made, with identities
        self._step = 0

    @property
    def has_states(self) -> bool:
        """True: `advance_state` and `end_step` are to be called."""
        return True

    @property
    def num_state_blocks(self) -> int:
        """State blocks that requests can use."""
        return self._states.num_blocks

    @property
    def num_free_state_blocks(self) -> int:
        """State blocks that no request holds; findable ones count."""
        return self._states.num_free_blocks

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """As `KVCacheManager.get_computed_blocks`, but the number of tokens is that before the last known state."""
        block_ids, self.num_known_tokens = super().get_computed_blocks(request_id, token_ids, salt)
        return block_ids, self._found_state(block_ids).num_tokens

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """As `KVCacheManager.allocate_slots`; a new request also gets room for its two state blocks.

        It begins with the last state that is known for a part of `computed_block_ids`, and only reads those blocks.
        """
        if request_id in self._state_tables:
            return super().allocate_slots(request_id, num_tokens, computed_block_ids, salt)
        if not self._has_room_for_states():
            return None
        lookup_id, state = self._last_lookup[0], self._found_state(computed_block_ids)
        block_ids = super().allocate_slots(request_id, num_tokens, computed_block_ids, salt)
        if block_ids is not None:
            self._states.share(state.block_id, is_found=True)
            self._state_tables[request_id] = _StateTable(state)
            if lookup_id == request_id:
                num_without_state = len(computed_block_ids) * self._block_size - state.num_tokens
                self.prefix_tokens_without_state += num_without_state
                self.prefix_cache_hits -= num_without_state
        return block_ids

    def advance_state(
        self, request_id: str, num_tokens: int, *, is_kept: bool = True, replaces_last: bool = False
    ) -> tuple[int, int]:
        """The state blocks that the request's row of this step reads and writes.

        Called once per row. The row writes the state after the request's first `num_tokens` tokens, whatever drafts
        follow them. What it read in its step before is given back.

        Args:
            request_id: A request that holds blocks.
            num_tokens: More than in its step before.
            is_kept: The state may be found later, if it is at a block boundary.
            replaces_last: The last state that was kept so is then no longer found, unless a lookup has found it.

        Raises:
            UnknownRequestError: The request holds no blocks.
            ValueError: `num_tokens` is not more than before.
        """
        table = self._state_tables.get(request_id)
        if table is None:
            raise UnknownRequestError(request_id)
        if num_tokens <= table.current.num_tokens:
            raise ValueError(f"num_tokens must be more than {table.current.num_tokens}, got {num_tokens}")
        if table.previous is not None:
            self._states.release(table.previous.block_id)
        table.previous = table.current
        table.current = _State(self._states.take(), num_tokens, self._step, is_kept, replaces_last)
        self._note_boundary(request_id, table)
        return table.previous.block_id, table.current.block_id

    def known_state(self, block_ids: Sequence[int]) -> tuple[int, int]:
        """How many of the blocks of a prefix end with a known state, and that state's block."""
        state = self._found_state(block_ids)
        return state.num_tokens // self._block_size, state.block_id

    def end_step(self) -> None:
        """Ends the making of a step: the next one may read the states that this one writes."""
        self._step += 1
        for table, state, identity in self._pending:
            self._publish(table, state, identity)
        self._pending.clear()

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """As `KVCacheManager.cache_blocks`; a state at the last boundary becomes findable, once it is written."""
        super().cache_blocks(request_id, token_ids, num_computed_tokens)
        self._note_boundary(request_id, self._state_tables[request_id])

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """Whether another request can go on from the first `num_tokens` tokens of this one: their state is held.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        self._table(request_id)
        return self._state_after(request_id, num_tokens) is not None

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """As `KVCacheManager.fork`; the child shares the state after the tokens.

        Raises:
            UnknownRequestError: The parent holds no blocks.
            DuplicateRequestError: The child holds blocks already, here or in the host pool.
            ValueError: `num_tokens` is not positive, or the parent holds no state after so many tokens.
        """
        self._table(parent_id)
        state = self._state_after(parent_id, num_tokens)
        if state is None:
            raise ValueError(f"num_tokens {num_tokens} is where the parent holds no state")
        if not self._has_room_for_states():
            return None
        copies = super().fork(parent_id, child_id, num_tokens)
        if copies is not None:
            self._states.share(state.block_id)
            child = _State(state.block_id, num_tokens, state.step, is_kept=False, replaces_last=False)
            self._state_tables[child_id] = _StateTable(child)
        return copies

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """As `KVCacheManager.swap_out`; None too where all state blocks would be kept for swapped-out requests."""
        self._table(request_id)
        if not self._has_room_for_states():
            return None
        copies = super().swap_out(request_id)
        table = self._state_tables[request_id]
        if copies is not None and table.previous is not None:
            self._states.release(table.previous.block_id)
            table.previous = None
        return copies

    def free(self, request_id: str) -> None:
        """As `KVCacheManager.free`; its states stay findable."""
        super().free(request_id)
        table = self._state_tables.pop(request_id, None)
        if table is not None:
            self._pending = [entry for entry in self._pending if entry[0] is not table]
            for state in table.states:
                self._states.release(state.block_id)

    def reset_prefix_cache(self) -> bool:
        """As `KVCacheManager.reset_prefix_cache`, states included."""
        if not super().reset_prefix_cache():
            return False
        self._states.forget_contents()
        return True

    def snapshot_states(self) -> dict[str, Any]:
        """The states of all requests and of the pool, as plain data. Between steps only."""
        return {
            "pool": self._states.snapshot(),
            "step": self._step,
            "tables": [
                (request_id, list(table.last_kept or ()), [_fields(state) for state in table.states])
                for request_id, table in self._state_tables.items()
            ],
        }

    def restore_states(self, state: dict[str, Any]) -> None:
        """Puts a new manager into the state that `snapshot_states` returned.

        Raises:
            ValueError: It is of a pool of another size.
        """
        self._states.restore(state["pool"])
        self._step = state["step"]
        self._state_tables = {}
        for request_id, last_kept, states in state["tables"]:
            *before, current = (_State(*fields) for fields in states)
            table = self._state_tables[request_id] = _StateTable(current)
            table.previous = before[0] if before else None
            table.last_kept = (last_kept[0], last_kept[1]) if last_kept else None

    def _has_room_for_states(self) -> bool:
        """Whether one more request could hold two state blocks; so a row that has begun always gets its next one."""
        return _BLOCKS_PER_REQUEST * (len(self._state_tables) + 1) <= self._states.num_blocks

    def _found_state(self, computed_block_ids: Sequence[int]) -> _State:
        """The state that a new request begins with: the last one that is known within a prefix."""
        for number in range(len(computed_block_ids), 0, -1):
            identity = self._identity(computed_block_ids[number - 1])
            block_id = None if identity is None else self._states.find(identity)
            if block_id is not None:
                return _State(block_id, number * self._block_size, -1, is_kept=False, replaces_last=False)
        return _State(EMPTY_STATE_ID, 0, -1, is_kept=False, replaces_last=False)

    def _identity(self, block_id: int) -> int | None:
        """Identity of the prefix that ends with a block; None where the block cannot be found."""
        runs = self._prefix_index.runs
        return self._prefix_index.prefix(block_id).identity if 0 <= block_id < len(runs) and runs[block_id] else None

    def _state_after(self, request_id: str, num_tokens: int) -> _State | None:
        """The request's state after so many tokens, if it is held and was written by an earlier step."""
        states = self._state_tables[request_id].states
        return next((state for state in states if state.num_tokens == num_tokens and state.step < self._step), None)

    def _note_boundary(self, request_id: str, state_table: _StateTable) -> None:
        """Publishes the request's states after cached blocks: now, or at the end of the step that writes one."""
        table = self._tables[request_id]
        for state in state_table.states:
            num_blocks, num_rest = divmod(state.num_tokens, self._block_size)
            if not state.is_kept or num_rest or not 0 < num_blocks <= table.num_cached_blocks:
                continue
            state.is_kept = False  # once only
            is_last = num_blocks == table.num_cached_blocks
            identity = table.prefix.identity if is_last else self._identity(table.block_ids[num_blocks - 1])
            if identity is None:
                continue  # the block was found, and has been forgotten since
            if state.step < self._step:
                self._publish(state_table, state, identity)
            else:
                self._pending.append((state_table, state, identity))

    def _publish(self, table: _StateTable, state: _State, identity: int) -> None:
        if not self._states.publish(state.block_id, identity) or not state.replaces_last:
            return
        if table.last_kept is not None:
            self._states.withdraw(*table.last_kept)
        table.last_kept = state.block_id, identity

    def _request_problems(self) -> list[str]:
        problems = super()._request_problems()
        if len(self._state_tables) != len(self._tables) + sum(map(self._host_pool.holds, self._state_tables)):
            problems.append("a request has keys and values without a state, or a state alone")
        return problems + self._states.inconsistencies(self._owned_states())

    def _owned_states(self) -> Iterator[int]:
        return (state.block_id for table in self._state_tables.values() for state in table.states)


def _fields(state: _State) -> list[Any]:
    return [state.block_id, state.num_tokens, state.step, state.is_kept, state.replaces_last]
