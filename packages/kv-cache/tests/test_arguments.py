"""Arguments that make no sense are refused by name, and change nothing."""

import pytest

from llmstack_kv_cache import DuplicateRequestError, KVCacheError, KVCacheGroup, KVCacheManager

GROUPS = [KVCacheGroup("full"), KVCacheGroup("window", 99)]


def cached_blocks(cache: KVCacheManager, tokens: list[int]) -> list[int]:
    cache.allocate_slots("first", len(tokens))
    cache.cache_blocks("first", tokens, len(tokens))
    cache.free("first")
    return cache.get_computed_blocks("next", [*tokens, 0])[0]


@pytest.mark.parametrize("groups", [(), ("full",), ("full", "window")])
def test_blocks_out_of_their_order_or_without_their_beginning_are_no_prefix(groups: tuple[str, ...]):
    if groups:
        cache = KVCacheManager(16, 4, groups=[KVCacheGroup(name, 4 if name == "window" else None) for name in groups])
    else:
        cache = KVCacheManager(16, 4)
    found = cached_blocks(cache, list(range(8)))
    size = len(found) // 2
    assert size == max(len(groups), 1)
    exchanged = [found[2], found[1], found[0], found[3]] if size == 2 else found[::-1]
    for block_ids in (exchanged, found[-size:]):
        with pytest.raises(ValueError, match="computed_block_ids"):
            cache.allocate_slots("next", 9, block_ids)
    assert cache.allocate_slots("next", 9, found) is not None
    cache.check_integrity()


def test_blocks_of_another_group_that_cannot_be_found_are_no_prefix():
    cache = KVCacheManager(16, 4, groups=[KVCacheGroup("full"), KVCacheGroup("other")])
    found = cached_blocks(cache, list(range(8)))
    for block_ids in ([found[0], 15, *found[2:]], [found[0], found[3], *found[2:]], [found[0], -1, *found[2:]]):
        with pytest.raises(ValueError, match="computed_block_ids"):
            cache.allocate_slots("next", 9, block_ids)
    assert cache.allocate_slots("next", 9, found) is not None


@pytest.mark.parametrize("change", [lambda cache: cache.reset_prefix_cache(), lambda cache: cache.resize(1)])
def test_what_a_lookup_found_is_refused_once_it_is_forgotten(change):
    cache = KVCacheManager(8, 4)
    found = cached_blocks(cache, list(range(8)))
    assert change(cache)
    with pytest.raises(ValueError, match="computed_block_ids"):
        cache.allocate_slots("next", 9, found)
    cache.check_integrity()


@pytest.mark.parametrize("size", [1.5, "4", None, float("nan")])
def test_a_size_that_is_no_integer_is_refused_by_name(size):
    for name in ("num_blocks", "block_size", "num_host_blocks", "num_reserved_blocks", "max_events"):
        if (name, size) == ("num_reserved_blocks", None):
            continue  # as few as can be
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            KVCacheManager(**{"num_blocks": 8, name: size})
    if size is not None:
        with pytest.raises(ValueError, match="sliding_window of group 'w' must be an integer"):
            KVCacheManager(8, groups=[KVCacheGroup("w", size)])


def test_a_length_that_is_no_number_of_tokens_is_refused_by_name():
    for num_tokens in (1.5, float("nan")):
        with pytest.raises(ValueError, match="num_tokens must be an integer"):
            KVCacheManager(8, 4).allocate_slots("a", num_tokens)


@pytest.mark.parametrize("number", [9.0, "9", None])
@pytest.mark.parametrize(
    "make",
    [KVCacheManager, lambda *sizes: KVCacheManager(*sizes, groups=[KVCacheGroup("full"), KVCacheGroup("w", 99)])],
)
def test_a_number_of_tokens_or_blocks_that_is_no_integer_is_refused_at_any_time(make, number):
    cache = make(16, 4)
    cache.allocate_slots("a", 5)
    calls = {
        "num_tokens": (lambda: cache.allocate_slots("a", number), lambda: cache.fork("a", "b", number)),
        "num_computed_tokens": (
            lambda: cache.cache_blocks("a", list(range(12)), number),
            lambda: cache.advance("a", number),
        ),
        "num_blocks": (lambda: cache.resize(number),),
        "max_events": (lambda: cache.start_events(number),),
    }
    before = cache.block_table("a")
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises(ValueError, match=f"{name} must be an integer"):
                call()
    assert cache.block_table("a") == before
    assert len(cache.allocate_slots("a", 9)) == cache.num_groups
    cache.check_integrity()


def test_a_watermark_that_is_no_number_is_refused_by_name():
    with pytest.raises(ValueError, match="watermark"):
        KVCacheManager(8, watermark="0.1")


def test_errors_name_requests_whose_ids_are_no_texts():
    cache = KVCacheManager(8, 4, num_host_blocks=8)
    cache.allocate_slots(7, 5)
    for call, sentence in (
        (lambda: cache.block_table(8), "request_id '8' holds no blocks"),
        (lambda: cache.fork(7, 7, 1), "request_id '7' holds blocks already"),
        (lambda: cache.fork(7, 8, 99), "num_tokens 99 is not within the slots of '7'"),
    ):
        with pytest.raises((KVCacheError, ValueError)) as caught:
            call()
        assert str(caught.value) == sentence


def test_a_model_has_at_most_255_groups():
    groups = [KVCacheGroup(str(number)) for number in range(256)]
    assert KVCacheManager(300, groups=groups[:255]).num_groups == 255
    with pytest.raises(ValueError, match="1 to 255 groups"):
        KVCacheManager(300, groups=groups)


def test_a_request_on_the_host_is_no_child_of_a_fork():
    manager = KVCacheManager(20, 2, num_host_blocks=8, groups=[KVCacheGroup("full")])
    for name in ("parent", "child"):
        manager.allocate_slots(name, 4)
    manager.swap_out("child")
    with pytest.raises(DuplicateRequestError, match="child"):
        manager.fork("parent", "child", 4)


def test_a_cache_keeps_more_than_its_reserved_blocks():
    cache = KVCacheManager(8, 4, num_reserved_blocks=2)
    with pytest.raises(ValueError, match="num_blocks must be more than the 2 reserved, got 2"):
        cache.resize(2)
    assert cache.resize(3)
    assert cache.num_blocks == 1


def test_the_least_request_has_one_token_and_forks_are_counted():
    for cache in (KVCacheManager(8, 4), KVCacheManager(9, 4, groups=[KVCacheGroup("full")])):
        assert len(cache.allocate_slots("a", 1)) == 1
        for name in ("b", "c"):
            assert len(cache.fork("a", name, 1)) == 1
        assert cache.stats().num_forks == 2


def test_a_part_of_what_a_lookup_has_found_is_refused_in_a_sentence():
    cache = KVCacheManager(16, 4, groups=[KVCacheGroup("full"), KVCacheGroup("other")])
    found = cached_blocks(cache, list(range(8)))
    with pytest.raises(
        ValueError, match=r"^computed_block_ids must be those of the last get_computed_blocks, not forgotten since$"
    ):
        cache.allocate_slots("next", 9, found[:3])
