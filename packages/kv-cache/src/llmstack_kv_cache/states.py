"""The states of requests, for layers that keep one state of all tokens."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from llmstack_kv_cache.block import BlockTable, check_integer
from llmstack_kv_cache.prefix_index import PrefixIndex
from llmstack_kv_cache.state_pool import EMPTY_STATE_ID, StatePool

_BLOCKS_PER_REQUEST = 2


@dataclass(slots=True)
class State:
    """A state block of a request.

    Attributes:
        num_tokens: Tokens of the request after which it is the state.
        step: The step that writes it.
        is_kept: Whether it is to be found at a block boundary.
        replaces_last: Whether it is found in place of the last such state of the request.
    """

    block_id: int
    num_tokens: int
    step: int = -1
    is_kept: bool = False
    replaces_last: bool = False


EMPTY_STATE = State(EMPTY_STATE_ID, 0)
"""The state before the first token."""


@dataclass(slots=True, eq=False)
class StateTable:
    """The live state blocks of a request, at most two.

    Attributes:
        current: The state that its next step begins with.
        previous: The state that its last step began with; None once it is given back.
        last_kept: Block and identity of the last state that was found in place of an older one.
    """

    current: State
    previous: State | None = None
    last_kept: tuple[int, int] | None = None

    @property
    def states(self) -> list[State]:
        """Its live states, the older one first."""
        return [self.current] if self.previous is None else [self.previous, self.current]


class RequestStates:
    """The state table of each request, swapped-out ones included, over a pool of state blocks."""

    def __init__(self, num_blocks: int, index: PrefixIndex, block_size: int) -> None:
        """`index` gives prefixes their identities.

        Raises:
            ValueError: `num_blocks` is less than the empty state and one request need.
        """
        check_integer("num_state_blocks", num_blocks, 1 + _BLOCKS_PER_REQUEST)
        self.pool = StatePool(num_blocks, index)
        self.tables: dict[str, StateTable] = {}
        self._index, self._block_size = index, block_size
        self._pending: list[tuple[StateTable, State, int]] = []  # written by the step being made, with identities
        self._step = 0

    def has_room(self) -> bool:
        """Whether one more request could hold two state blocks; so a row that has begun always gets its next one."""
        return _BLOCKS_PER_REQUEST * (len(self.tables) + 1) <= self.pool.num_blocks

    def find(self, block_ids: Sequence[int], num_blocks: int) -> State:
        """The last known state after any of the first `num_blocks` blocks of a prefix."""
        for number in range(num_blocks, 0, -1):
            identity = self._index.identity(block_ids[number - 1])
            block_id = None if identity is None else self.pool.find(identity)
            if block_id is not None:
                return State(block_id, number * self._block_size)
        return EMPTY_STATE

    def begin(self, request_id: str, state: State, *, is_found: bool = False) -> None:
        """Gives a new request a state that it shares; `is_found`: a lookup has led to it."""
        self.pool.share(state.block_id, is_found=is_found)
        self.tables[request_id] = StateTable(state)

    def advance(
        self, request_id: str, num_tokens: int, blocks: BlockTable, is_kept: bool, replaces_last: bool
    ) -> tuple[int, int]:
        """As `KVCacheManager.advance_state`, for a request with the table `blocks`."""
        table = self.tables[request_id]
        if num_tokens <= table.current.num_tokens:
            raise ValueError(f"num_tokens must be more than {table.current.num_tokens}, got {num_tokens}")
        self.drop_previous(request_id)
        table.previous = table.current
        table.current = State(self.pool.take(), num_tokens, self._step, is_kept, replaces_last)
        self.note_boundary(request_id, blocks)
        return table.previous.block_id, table.current.block_id

    def after(self, request_id: str, num_tokens: int) -> State | None:
        """The request's state after so many tokens, for another one, if it is held and an earlier step wrote it."""
        for state in self.tables[request_id].states:
            if state.num_tokens == num_tokens and state.step < self._step:
                return State(state.block_id, num_tokens, state.step)
        return None

    def note_boundary(self, request_id: str, blocks: BlockTable) -> None:
        """Publishes the request's states after cached blocks: now, or at the end of the step that writes one."""
        table = self.tables[request_id]
        for state in table.states:
            num_blocks, num_rest = divmod(state.num_tokens, self._block_size)
            if not state.is_kept or num_rest or not 0 < num_blocks <= blocks.num_cached_blocks:
                continue
            state.is_kept = False  # once only
            place, identity = num_blocks - 1 - blocks.num_passed_blocks, None
            if num_blocks == blocks.num_cached_blocks:
                identity = blocks.prefix.identity
            elif place >= 0:
                identity = self._index.identity(blocks.block_ids[place])
            if identity is not None and state.step < self._step:  # else the block was found, and forgotten since
                self._publish(table, state, identity)
            elif identity is not None:
                self._pending.append((table, state, identity))

    def end_step(self) -> None:
        """Ends the making of a step: the next one may read the states that this one writes."""
        self._step += 1
        for entry in self._pending:
            self._publish(*entry)
        self._pending.clear()

    def drop_previous(self, request_id: str) -> None:
        """Gives the state back that the request's last step began with."""
        table = self.tables[request_id]
        if table.previous is not None:
            self.pool.release(table.previous.block_id)
            table.previous = None

    def free(self, request_id: str) -> None:
        """Gives the states of a request back, which stay findable."""
        table = self.tables.pop(request_id)
        self._pending = [entry for entry in self._pending if entry[0] is not table]
        for state in table.states:
            self.pool.release(state.block_id)

    def inconsistencies(self, request_ids: Set[str]) -> list[str]:
        """Violated invariants, where `request_ids` are all requests, swapped-out ones included."""
        is_one_each = self.tables.keys() == request_ids
        problems = [] if is_one_each else ["a request has keys and values without a state, or a state alone"]
        owned = (state.block_id for table in self.tables.values() for state in table.states)
        return problems + self.pool.inconsistencies(owned)

    def _publish(self, table: StateTable, state: State, identity: int) -> None:
        if not self.pool.publish(state.block_id, identity) or not state.replaces_last:
            return
        if table.last_kept is not None:
            self.pool.withdraw(*table.last_kept)
        table.last_kept = state.block_id, identity
