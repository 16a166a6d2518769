"""Hits of a prefix cache under several orders of eviction.

One of them knows the future. A pure calculation over prefixes: each request is computed before the next one, and
nothing else holds blocks. Blocks of one prefix are evicted from its end: none is found without those before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER = 1 << 62


class Access(NamedTuple):
    """One request: the chain of its prompt, and the tokens computed by its first token and by its end."""

    chain: int
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """Blocks that follow those of another chain, from the block `first` on; `path` has the chains before and itself."""

    parent: int | None
    first: int
    path: tuple[int, ...]


class PrefixTree:
    """The prefixes of all sessions: chains of blocks, each of which begins within another one, or at the start."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._chains: list[_Chain] = []

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, parent: int | None = None, num_tokens: int = 0) -> int:
        """A chain behind the first `num_tokens` tokens of another; of its last block, only what is full is shared."""
        path = () if parent is None else self._chains[parent].path
        self._chains.append(_Chain(parent, num_tokens // self.block_size, (*path, len(self._chains))))
        return len(self._chains) - 1

    def again(self, chain: int) -> int:
        """A chain with the same beginning as this one."""
        parent, first = self._chains[chain].parent, self._chains[chain].first
        return self.add(parent, first * self.block_size)

    def parent(self, chain: int) -> int | None:
        """The chain within which this chain begins."""
        return self._chains[chain].parent

    def first(self, chain: int) -> int:
        """The block that a chain begins with."""
        return self._chains[chain].first

    def needs(self, access: Access, num_tokens: int) -> list[tuple[int, int]]:
        """The chains of a request, each with the end of the blocks that so many of its tokens fill there."""
        path = self._chains[access.chain].path
        ends = [self._chains[chain].first for chain in path[1:]]
        return list(zip(path, [*ends, num_tokens // self.block_size], strict=True))


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The hits of a policy.

    Attributes:
        num_found_tokens: Of the prompts.
        num_again_tokens: Tokens that were computed before and could not be found.
    """

    num_found_tokens: int
    num_again_tokens: int


@dataclass(slots=True)
class _Cached:
    """The blocks of a chain that are in the cache, up to `end`.

    Attributes:
        uses: Ends of blocks with the last request that used all before them, the latest request first.
    """

    first: int
    end: int
    uses: list[tuple[int, int]] = field(default_factory=list)

    def use(self, end: int, number: int) -> None:
        """Request `number` uses all blocks before `end`, which are there from now on."""
        self.uses = [(end, number), *(use for use in self.uses if use[0] > end)]
        self.end = max(self.end, end)

    def cut(self, end: int) -> None:
        """Evicts the blocks from `end` on."""
        kept = [use for use in self.uses if use[0] < end]
        if end > self.first:
            kept.append((end, self.uses[len(kept)][1]))
        self.end, self.uses = end, kept


Rank = Callable[[int, _Cached, int], tuple[int, int]]
"""For a chain, what is cached of it, and the number of the present request: what is greater is evicted first, and the
block from which on that holds."""


def replay_cache(tree: PrefixTree, accesses: Sequence[Access], num_blocks: int) -> dict[str, PolicyResult]:
    """The hits of each policy over the requests, in their order.

    `lru` evicts what was used the longest ago. `oracle` evicts what is needed again last, or never (Belady).
    """
    future = _Future(tree, accesses)
    return {name: _replay(tree, accesses, num_blocks, rank) for name, rank in (("lru", _age), ("oracle", future.rank))}


def _replay(tree: PrefixTree, accesses: Sequence[Access], num_blocks: int, rank: Rank) -> PolicyResult:
    cached = [_Cached(tree.first(chain), tree.first(chain)) for chain in range(len(tree))]
    known = [tree.first(chain) for chain in range(len(tree))]
    kept: dict[int, None] = {}  # the chains that have blocks
    num_found = num_again = num_used = 0
    for number, access in enumerate(accesses):
        needed = tree.needs(access, access.num_prompt_tokens - 1)
        found = _reach(needed, [cached[chain].end for chain, _ in needed])
        findable = _reach(needed, [known[chain] for chain, _ in needed])
        num_found += found * tree.block_size
        num_again += (findable - found) * tree.block_size
        for chain, end in tree.needs(access, access.num_tokens):
            one = cached[chain]
            num_used += max(0, end - one.end)
            known[chain] = max(known[chain], end)
            if end > one.first:
                one.use(end, number)
                kept[chain] = None
        num_used -= _evict(cached, kept, num_used - num_blocks, rank, number)
    return PolicyResult(num_found, num_again)


def _reach(needed: list[tuple[int, int]], ends: list[int]) -> int:
    """The number of blocks that are there from the first on, where each chain has those before its end."""
    for (_, needed_end), end in zip(needed, ends, strict=True):
        if end < needed_end:
            return end
    return needed[-1][1]


def _evict(cached: list[_Cached], kept: dict[int, None], num_blocks: int, rank: Rank, number: int) -> int:
    """Evicts so many blocks at least, if it is more than none; how many it were."""
    num_evicted = 0
    while num_evicted < num_blocks:
        _, start, chain = max((*rank(chain, cached[chain], number), chain) for chain in kept)
        one = cached[chain]
        end = max(start, one.first, one.end - (num_blocks - num_evicted))
        num_evicted += one.end - end
        one.cut(end)
        if end == one.first:
            del kept[chain]
    return num_evicted


def _age(chain: int, one: _Cached, number: int) -> tuple[int, int]:
    """The longer ago, the greater."""
    start = one.uses[-2][0] if len(one.uses) > 1 else one.first
    return number - one.uses[-1][1], start


class _Future:
    """When the blocks of a chain are needed next."""

    def __init__(self, tree: PrefixTree, accesses: Sequence[Access]) -> None:
        self._uses: list[list[tuple[int, int]]] = [[] for _ in range(len(tree))]
        for number, access in enumerate(accesses):
            for chain, end in tree.needs(access, access.num_prompt_tokens - 1):
                self._uses[chain].append((number, end))

    def rank(self, chain: int, one: _Cached, number: int) -> tuple[int, int]:
        """The next request that needs the last block of the chain; what comes before is needed sooner."""
        uses, start = self._uses[chain], one.first
        for index in range(bisect_right(uses, (number, NEVER)), len(uses)):
            next_number, end = uses[index]
            if end >= one.end:
                return next_number, start
            start = max(start, end)
        return NEVER, start
