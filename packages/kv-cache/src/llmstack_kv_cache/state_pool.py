"""The pool of state blocks: owners, identities, and the order of eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from llmstack_kv_cache.events import CompanionRemoved, CompanionStored
from llmstack_kv_cache.prefix_index import PrefixIndex

EMPTY_STATE_ID = 0
"""The state before the first token: a block of zeros, which is never written and belongs to no request."""

_MAX_PROVEN_SHARE = (3, 4)
"""Share of the pool that found states may take. More of them would leave no room for the states of new prompts."""


class StatePool:
    """State blocks that are held, or free and findable, or unused.

    A block holds the state of all state layers after one prefix. It is found by the identity of that prefix. Unused
    blocks are taken first, then the least recently used states that no lookup has found, then those found.

    Attributes:
        num_blocks: All blocks but the one of the empty state.
        num_evictions: Counter of states given up to make room.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        """`num_blocks`: With the block of the empty state. `index`: Has the prefixes, and the log of events."""
        self._index = index
        self.num_blocks = num_blocks - 1
        self.num_evictions = 0
        self._num_owners: dict[int, int] = {}
        self._unused = list(range(num_blocks - 1, EMPTY_STATE_ID, -1))  # taken from its end
        self._block_to_identity: dict[int, int] = {}
        self._identity_to_block: dict[int, int] = {}
        self._proven_ids: set[int] = set()  # found by a lookup since they became findable
        self._fresh: OrderedDict[int, None] = OrderedDict()  # free and findable, least recently used first
        self._proven: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner; findable ones count, since taking a block may evict them."""
        return self.num_blocks - len(self._num_owners)

    @property
    def identities(self) -> list[int]:
        """The prefixes after which a state can be found."""
        return list(self._identity_to_block)

    def take(self) -> int:
        """Takes a block, of which one must be free, for one owner; its content is no longer findable."""
        if self._unused:
            block_id = self._unused.pop()
        else:
            block_id, _ = (self._fresh or self._proven).popitem(last=False)
            self._forget(block_id)
            self.num_evictions += 1
        self._num_owners[block_id] = 1
        return block_id

    def share(self, block_id: int, *, is_found: bool = False) -> None:
        """Adds an owner to a held or findable block; `is_found`: a lookup has led to it."""
        if block_id == EMPTY_STATE_ID:
            return
        self._fresh.pop(block_id, None)
        self._proven.pop(block_id, None)
        self._num_owners[block_id] = self._num_owners.get(block_id, 0) + 1
        if is_found:
            self._proven_ids.add(block_id)

    def release(self, block_id: int) -> None:
        """Takes an owner from a block; without one it stays findable, or is unused."""
        if block_id == EMPTY_STATE_ID:
            return
        self._num_owners[block_id] -= 1
        if self._num_owners[block_id]:
            return
        del self._num_owners[block_id]
        if block_id not in self._block_to_identity:
            self._unused.append(block_id)
        elif block_id in self._proven_ids:
            self._proven[block_id] = None
            share, whole = _MAX_PROVEN_SHARE
            if len(self._proven) > self.num_blocks * share // whole:
                oldest, _ = self._proven.popitem(last=False)
                self._fresh[oldest] = None
        else:
            self._fresh[block_id] = None

    def find(self, identity: int) -> int | None:
        """The block with the state after the prefix `identity`."""
        return self._identity_to_block.get(identity)

    def publish(self, block_id: int, identity: int) -> bool:
        """Makes a held block findable; False, with nothing done, where the state is known or the block has one."""
        if identity in self._identity_to_block or block_id in self._block_to_identity:
            return False
        self._block_to_identity[block_id] = identity
        self._identity_to_block[identity] = block_id
        if self._index.events is not None:
            self._index.events.add(CompanionStored((identity,), self._index.block_size, self._index.state_group))
        return True

    def withdraw(self, block_id: int, identity: int) -> None:
        """Makes a state unfindable, unless a lookup has found it; nothing if the block holds another by now."""
        if self._block_to_identity.get(block_id) != identity or block_id in self._proven_ids:
            return
        self._forget(block_id)
        if block_id in self._fresh:
            del self._fresh[block_id]
            self._unused.append(block_id)

    def forget_contents(self) -> None:
        """Makes every state unfindable."""
        for block_id in list(self._block_to_identity):
            self._forget(block_id)
        self._unused += [*self._fresh, *self._proven]
        self._fresh.clear()
        self._proven.clear()

    def inconsistencies(self, owned: Iterable[int]) -> list[str]:
        """Violated invariants, where `owned` has each block once for each owner."""
        held = Counter(block_id for block_id in owned if block_id != EMPTY_STATE_ID)
        problems = []
        if held != Counter(self._num_owners):
            problems.append("the owners of state blocks are miscounted")
        free = [*self._unused, *self._fresh, *self._proven]
        if sorted([*free, *held]) != list(range(1, self.num_blocks + 1)):
            problems.append("the state blocks are not each free or held")
        if {block: identity for identity, block in self._identity_to_block.items()} != self._block_to_identity:
            problems.append("the states and their blocks disagree on what is found where")
        findable = set(self._block_to_identity)
        if findable & set(self._unused) or not findable >= {*self._fresh, *self._proven} | self._proven_ids:
            problems.append("a state block is in the wrong order of eviction")
        return problems

    def snapshot(self) -> dict[str, Any]:
        """All that later answers depend on, as plain data."""
        return {
            "num_blocks": self.num_blocks,
            "owners": [list(pair) for pair in self._num_owners.items()],
            "unused": self._unused.copy(),
            "findable": [list(pair) for pair in self._block_to_identity.items()],
            "proven_ids": sorted(self._proven_ids),
            "order": [list(self._fresh), list(self._proven)],
            "num_evictions": self.num_evictions,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts a new pool of the same size into the state of a snapshot.

        Raises:
            ValueError: The snapshot is of a pool of another size.
        """
        if state["num_blocks"] != self.num_blocks:
            raise ValueError(f"the snapshot has {state['num_blocks']} state blocks, the cache {self.num_blocks}")
        self._num_owners = dict(state["owners"])
        self._unused = list(state["unused"])
        self._block_to_identity = dict(state["findable"])
        self._identity_to_block = {identity: block_id for block_id, identity in state["findable"]}
        self._proven_ids = set(state["proven_ids"])
        self._fresh, self._proven = (OrderedDict.fromkeys(block_ids) for block_ids in state["order"])
        self.num_evictions = state["num_evictions"]

    def _forget(self, block_id: int) -> None:
        identity = self._block_to_identity.pop(block_id)
        del self._identity_to_block[identity]
        if self._index.events is not None:
            self._index.events.add(CompanionRemoved((identity,), self._index.state_group))
        self._proven_ids.discard(block_id)
