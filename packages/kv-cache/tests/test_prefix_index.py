"""Everything that was computed and not evicted is found, however it was computed."""

from hypothesis import given
from hypothesis import strategies as st

from llmstack_kv_cache import KVCacheGroup, KVCacheManager

prompts = st.builds(
    lambda pattern, length, tail: [pattern[i % len(pattern)] for i in range(length)] + tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.integers(0, 300),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
requests = st.lists(
    st.tuples(prompts, st.sampled_from(["", "tenant"]), st.integers(1, 200), st.booleans()), min_size=1, max_size=8
)


def num_common(tokens, others):
    """Length of the longest prefix that `tokens` has in common with any of the others."""
    longest = 0
    for other in others:
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
        )
        longest = max(longest, same)
    return longest


@given(block_size=st.sampled_from([1, 2, 3, 16, 64]), requests=requests)
def test_a_hit_is_the_longest_prefix_that_any_request_left(block_size, requests):
    manager = KVCacheManager(num_blocks=5000, block_size=block_size)
    computed = {"": [], "tenant": []}
    for number, (tokens, salt, chunk, is_freed) in enumerate(requests):
        request_id = str(number)
        block_ids, num_hits = manager.get_computed_blocks(request_id, tokens, salt)
        # Only whole blocks of the others can be found.
        whole = [other[: len(other) // block_size * block_size] for other in computed[salt]]
        assert num_hits == min(num_common(tokens, whole), len(tokens) - 1) // block_size * block_size
        for end in range(num_hits + 1, len(tokens) + chunk, chunk):
            manager.allocate_slots(request_id, min(end, len(tokens)), block_ids, salt)
            manager.cache_blocks(request_id, tokens, min(end, len(tokens)))
            block_ids = ()
        computed[salt].append(tokens)
        if is_freed:
            manager.free(request_id)
    manager.check_integrity()


@given(block_size=st.sampled_from([1, 3, 16]), requests=requests)
def test_groups_that_all_see_everything_hit_as_one_does(block_size, requests):
    plain = KVCacheManager(num_blocks=5000, block_size=block_size)
    groups = [KVCacheGroup("a"), KVCacheGroup("b"), KVCacheGroup("c", sliding_window=10_000)]
    hybrid = KVCacheManager(num_blocks=15_000, block_size=block_size, groups=groups)
    for number, (tokens, salt, _, is_freed) in enumerate(requests):
        num_hits = []
        for manager in (plain, hybrid):
            block_ids, num_tokens = manager.get_computed_blocks(str(number), tokens, salt)
            manager.allocate_slots(str(number), len(tokens), block_ids, salt)
            manager.cache_blocks(str(number), tokens, len(tokens))
            if is_freed:
                manager.free(str(number))
            num_hits.append(num_tokens)
        assert num_hits[0] == num_hits[1]
    hybrid.check_integrity()


def test_an_identity_that_died_with_its_block_is_not_given_to_what_takes_its_place():
    manager = KVCacheManager(num_blocks=7, block_size=1)
    manager.allocate_slots("a", 3)
    manager.cache_blocks("a", [1, 2, 3], 3)
    manager.allocate_slots("b", 4)  # copies of the same, and a child of the last block of "a"
    manager.cache_blocks("b", [1, 2, 3, 4], 4)
    manager.free("a")
    manager.allocate_slots("x", 1)  # evicts the last block of "a"
    manager.free("x")
    block_ids, num_hits = manager.get_computed_blocks("c", [1, 2, 9])
    assert num_hits == 2
    manager.allocate_slots("c", 3, block_ids)
    manager.cache_blocks("c", [1, 2, 9], 3)  # goes on where the last block of "a" was
    assert manager.get_computed_blocks("d", [1, 2, 9, 4, 0])[1] == 3


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), data=st.data())
def test_what_blocks_hold_is_a_number_of_its_own(lengths, data):
    manager = KVCacheManager(num_blocks=sum(lengths), block_size=1)
    for number, length in enumerate(lengths):
        manager.allocate_slots(str(number), length)
        manager.cache_blocks(str(number), [1000 * number + token for token in range(length)], length)
        manager.free(str(number))
    before = manager.contents(range(sum(lengths)))
    assert 0 not in before
    assert len({*before}) == len(before)
    asked = data.draw(st.lists(st.sampled_from(range(sum(lengths)))))
    assert manager.contents(asked) == [before[block_id] for block_id in asked]
    taken = manager.allocate_slots("x", data.draw(st.integers(1, sum(lengths))))
    manager.cache_blocks("x", [-1] * len(taken), len(taken))
    after = manager.contents(range(sum(lengths)))
    assert all(after[block_id] not in before for block_id in taken)
    assert all(after[block_id] in (0, before[block_id]) for block_id in {*range(sum(lengths))} - {*taken})


def test_a_fork_that_looks_its_blocks_up_again_makes_unreachable_blocks_findable():
    manager = KVCacheManager(num_blocks=5, block_size=1)
    manager.allocate_slots("a", 1)
    manager.cache_blocks("a", [1], 1)
    manager.allocate_slots("b", 3)
    manager.cache_blocks("b", [1, 2, 3], 3)  # its first block is a copy of that of "a"
    manager.free("a")
    manager.allocate_slots("x", 2)  # evicts that one, so that nothing of "b" is found any more
    manager.fork("b", "c", 2)
    manager.cache_blocks("c", [1, 2], 2)
    manager.check_integrity()
    assert manager.get_computed_blocks("d", [1, 2, 3]) == (manager.block_table("c"), 2)
