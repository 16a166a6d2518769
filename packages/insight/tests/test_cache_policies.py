"""Orders of eviction, compared with the real cache, with a search of all choices, and with examples."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_insight.simulate.cache_policies import Access, PrefixTree, replay_cache
from llmstack_kv_cache import KVCacheManager

BLOCK = 4


@st.composite
def workloads(draw: st.DrawFn, max_accesses: int = 25) -> tuple[PrefixTree, list[Access], list[tuple[int, ...]]]:
    """Chains that branch off each other, requests that make them longer or go back, and the tokens of each request."""
    tree = PrefixTree(BLOCK)
    contexts: list[list[int]] = []
    chains: list[int] = []
    accesses: list[Access] = []
    prompts: list[tuple[int, ...]] = []
    for number in range(draw(st.integers(1, max_accesses))):
        kind = draw(st.sampled_from(["new", "fork", "go on", "go on", "go on"])) if chains else "new"
        if kind == "new":
            chains.append(tree.add())
            contexts.append([])
            place = len(chains) - 1
        elif kind == "fork":
            parent = draw(st.integers(0, len(chains) - 1))
            chains.append(tree.add(chains[parent], len(contexts[parent])))
            contexts.append(list(contexts[parent]))
            place = len(chains) - 1
        else:
            place = draw(st.integers(0, len(chains) - 1))
        contexts[place] += [number + 1] * draw(st.integers(1, 3 * BLOCK))
        prompts.append(tuple(contexts[place]))
        accesses.append(Access(chains[place], len(prompts[-1]), len(prompts[-1])))
    return tree, accesses, prompts


def found_by_real_cache(prompts: list[tuple[int, ...]], num_blocks: int) -> int:
    """Tokens that the cache of the engine finds, where each prompt is computed before the next one."""
    manager, num_found = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=True), 0
    for number, prompt in enumerate(prompts):
        blocks, num_hits = manager.get_computed_blocks(str(number), prompt)
        assert manager.allocate_slots(str(number), len(prompt), blocks) is not None
        num_found += num_hits
        manager.cache_blocks(str(number), prompt, len(prompt))
        manager.free(str(number))
    return num_found


@given(workloads())
@settings(max_examples=100, deadline=None)
def test_with_room_for_all_every_policy_finds_what_the_engine_finds(
    workload: tuple[PrefixTree, list[Access], list[tuple[int, ...]]],
) -> None:
    tree, accesses, prompts = workload
    found = replay_cache(tree, accesses, 10_000)
    real = found_by_real_cache(prompts, 10_000)
    assert [result.num_found_tokens for result in found.values()] == [real, real]
    assert [result.num_again_tokens for result in found.values()] == [0, 0]


@given(workloads(), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_the_oracle_finds_as_much_as_any_other(
    workload: tuple[PrefixTree, list[Access], list[tuple[int, ...]]], num_blocks: int
) -> None:
    tree, accesses, _ = workload
    found = replay_cache(tree, accesses, num_blocks)
    assert found["oracle"].num_found_tokens >= found["lru"].num_found_tokens
    totals = {result.num_found_tokens + result.num_again_tokens for result in found.values()}
    assert len(totals) == 1  # what could be found is the same for both


@given(workloads(max_accesses=7), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_choice_of_evictions_finds_more_than_the_oracle(
    workload: tuple[PrefixTree, list[Access], list[tuple[int, ...]]], num_blocks: int
) -> None:
    tree, accesses, prompts = workload
    blocks = [[prompt[: (place + 1) * BLOCK] for place in range(len(prompt) // BLOCK)] for prompt in prompts]

    @cache
    def best(number: int, held: frozenset[tuple[int, ...]]) -> int:
        """The most blocks that the requests from `number` on find; what is held is closed under prefixes."""
        if number == len(prompts):
            return 0
        findable = blocks[number][: (len(prompts[number]) - 1) // BLOCK]
        num_found = 0
        while num_found < len(findable) and findable[num_found] in held:
            num_found += 1
        everything = held | set(blocks[number])
        return num_found + max(best(number + 1, kept) for kept in closed_subsets(everything, num_blocks))

    found = replay_cache(tree, accesses, num_blocks)
    assert found["oracle"].num_found_tokens == BLOCK * best(0, frozenset())


def closed_subsets(blocks: frozenset[tuple[int, ...]], most: int) -> set[frozenset[tuple[int, ...]]]:
    """The largest sets of at most `most` blocks, each of which is there with all before it."""
    found, edge = {frozenset[tuple[int, ...]]()}, {frozenset[tuple[int, ...]]()}
    for _ in range(min(most, len(blocks))):
        edge = {
            kept | {block} for kept in edge for block in blocks - kept if len(block) == BLOCK or block[:-BLOCK] in kept
        }
        found = edge or found
    return found


def test_the_order_of_use_decides_without_the_future() -> None:
    tree = PrefixTree(BLOCK)
    first, second, third = tree.add(), tree.add(), tree.add()
    accesses = [Access(chain, 2 * BLOCK + 1, 2 * BLOCK) for chain in (first, second, third, second, first)]
    found = replay_cache(tree, accesses, 4)
    assert found["lru"].num_found_tokens == 2 * BLOCK  # the second again; the first was evicted for the third
    assert found["oracle"].num_found_tokens == 4 * BLOCK


def test_a_prefix_that_others_use_stays() -> None:
    tree = PrefixTree(BLOCK)
    prefix = tree.add()
    chains = [tree.add(prefix, 3 * BLOCK) for _ in range(4)]
    accesses = [Access(chain, 4 * BLOCK + 1, 4 * BLOCK) for chain in chains]
    found = replay_cache(tree, accesses, 4)
    assert found["lru"].num_found_tokens == found["oracle"].num_found_tokens == 3 * 3 * BLOCK
