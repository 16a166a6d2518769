"""The prefix index of several groups: how much of a prefix all of them know."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_kv_cache.groups import NULL_BLOCK_ID, KVCacheGroup
from llmstack_kv_cache.prefix_index import PrefixIndex
from llmstack_kv_cache.states import EMPTY_STATE, RequestStates, State


class CommonPrefix:
    """One prefix, of which the leader's blocks are known, and how far the other groups can serve it."""

    def __init__(
        self, index: PrefixIndex, groups: Sequence[KVCacheGroup], leader: int, leading: list[int], block_size: int
    ) -> None:
        self._leading = leading
        self._identities = index.identities(leading)
        self._index, self._groups, self._block_size = index, groups, block_size
        self._known = [leading if number == leader else [NULL_BLOCK_ID] * len(leading) for number in range(len(groups))]
        self._first_known = [0 if number == leader else len(leading) for number in range(len(groups))]

    def longest(self, num_blocks: int) -> int:
        """The most blocks, up to `num_blocks`, with which every group has what it needs; none is looked up twice."""
        number = 0
        while num_blocks and number < len(self._groups):
            first = self._groups[number].first_of_prefix(num_blocks, self._block_size)
            known = min(self._first_known[number], num_blocks)
            while known > first and self._knows(number, known - 1):
                known -= 1
            self._first_known[number] = known
            number = number + 1 if known <= first else 0
            num_blocks = num_blocks if known <= first else known - 1
        return num_blocks

    def longest_with_state(self, states: RequestStates | None) -> tuple[int, int, State]:
        """The most blocks with which every group has what it needs; the most that end with a state too; that state."""
        num_known = num_hits = self.longest(len(self._identities))
        if states is None:
            return num_known, num_hits, EMPTY_STATE
        while True:
            state = states.find(self._leading, num_hits)
            num_with_state = state.num_tokens // self._block_size
            if num_with_state == num_hits:
                return num_known, num_hits, state
            num_hits = self.longest(num_with_state)

    def block_ids(self, num_blocks: int) -> list[list[int]]:
        """The first `num_blocks` blocks of each group, null blocks where it needs none to go on."""
        firsts = [group.first_of_prefix(num_blocks, self._block_size) for group in self._groups]
        return [
            [NULL_BLOCK_ID] * first + known[first:num_blocks] for first, known in zip(firsts, self._known, strict=True)
        ]

    def _knows(self, number: int, i: int) -> bool:
        block_id = self._index.find_companion(self._identities[i], number)
        self._known[number][i] = block_id or NULL_BLOCK_ID
        return block_id is not None
