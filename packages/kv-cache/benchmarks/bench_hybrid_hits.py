"""How much of their prompts sessions find again while hybrid caches fill; `extra_info` holds the hit rates.

Sessions of 1,024 tokens come in turn, in steps of 512 tokens, as the scheduler calls the cache. Full attention alone
is the limit: it finds everything until the pool is too small for all sessions.
"""

import pytest

from llmstack_kv_cache import KVCacheGroup, KVCacheManager

BLOCK_SIZE = 16
NUM_BLOCKS = 4000
NUM_TOKENS = 1024
STEP_TOKENS = 512
SHAPES = {"gemma": 5, "gpt-oss": 1, "full": 0}  # groups with a window of 128 beside one of full attention
WINDOW = 128


def make_manager(shape):
    windows = [KVCacheGroup(f"window {number}", WINDOW) for number in range(SHAPES[shape])]
    return KVCacheManager(NUM_BLOCKS + 1, BLOCK_SIZE, groups=[KVCacheGroup("full"), *windows])


def num_blocks_of_hits(shape):
    """Blocks that must stay for one session to be found again."""
    return NUM_TOKENS // BLOCK_SIZE + SHAPES[shape] * (WINDOW // BLOCK_SIZE + 1)


def run_request(manager, request_id, tokens):
    """Computes a request in steps and frees it; how many of its tokens it found."""
    found, num_found_tokens = manager.get_computed_blocks(request_id, tokens)
    num_computed_tokens = num_found_tokens
    while num_computed_tokens < len(tokens):
        if num_computed_tokens > num_found_tokens:
            manager.advance(request_id, num_computed_tokens)
        end = min(num_computed_tokens + STEP_TOKENS, len(tokens))
        assert manager.allocate_slots(request_id, end, found) is not None
        manager.cache_blocks(request_id, tokens, end)
        found, num_computed_tokens = (), end
    manager.free(request_id)
    return num_found_tokens


def run_round(manager, num_sessions):
    """The share of all tokens that one visit of each session finds."""
    num_found_tokens = sum(
        run_request(manager, str(number), range(number * NUM_TOKENS, (number + 1) * NUM_TOKENS))
        for number in range(num_sessions)
    )
    return round(num_found_tokens / (num_sessions * NUM_TOKENS), 3)


@pytest.mark.parametrize("percent", [30, 60, 80, 90])
@pytest.mark.parametrize("shape", SHAPES)
def test_sessions_in_turn(benchmark, shape, percent):
    manager = make_manager(shape)
    num_sessions = NUM_BLOCKS * percent // 100 // num_blocks_of_hits(shape)
    run_round(manager, num_sessions)
    rates = [run_round(manager, num_sessions) for _ in range(2)]
    benchmark.extra_info["hit_rates"] = rates
    benchmark.extra_info["sessions"] = num_sessions
    benchmark.pedantic(run_round, args=(manager, num_sessions), rounds=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_with_one_system_prompt(benchmark, shape):
    """512 tokens that all share, then 1,000 that are never sent again; the pool has long been full."""
    manager = make_manager(shape)
    for number in range(100):
        run_request(manager, str(number), range(number * 2000, number * 2000 + 1512))
    system_prompt = list(range(10**6, 10**6 + 512))

    def run(first, num_requests=100):
        return sum(
            run_request(manager, str(n), [*system_prompt, *range(n * 2000, n * 2000 + 1000)]) / 512
            for n in range(first, first + num_requests)
        )

    benchmark.extra_info["found_of_100"] = run(1000)
    benchmark.extra_info["found_of_next_100"] = run(1100)
    benchmark.pedantic(run, args=(2000,), rounds=3)
