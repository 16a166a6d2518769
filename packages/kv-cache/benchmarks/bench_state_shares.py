"""How much of their prompts requests find again, by the share of the bytes that states have; it is in `extra_info`.

The shapes are those of published models. A better share for one kind of traffic is what a pool could win at most whose
bytes move between keys and values and states.
"""

import random

import pytest

from llmstack_kv_cache import KVCacheManager

BLOCK_SIZE = 16
CHUNK = 2048
MIB = 1 << 20
SHAPES = {  # bytes of a block of keys and values, of a state, and of the cache
    "LFM2 1.2B": (192 * 1024, MIB // 5, 1024 * MIB),
    "Qwen3.5 4B": (MIB // 2, 60 * MIB, 12 * 1024 * MIB),
    "Qwen3.6 27B": (MIB, 147 * MIB, 48 * 1024 * MIB),
}
TRAFFIC = {  # sessions, turns, tokens of the shared system prompt, of a turn and of its answer
    "chats": (40, 6, 600, 120, 150),
    "documents": (6, 5, 200, 6000, 300),
}


def prompts(num_sessions, num_turns, num_system, num_turn, num_answer):
    """Of sessions that come in any order: each prompt is all that was said, and the answer follows it."""
    rng = random.Random(1)

    def words(number):
        return [rng.randrange(30_000) for _ in range(number)]

    system = words(num_system)
    sessions = [list(system) for _ in range(num_sessions)]
    for _ in range(num_turns):
        for number in rng.sample(range(num_sessions), num_sessions):
            prompt, answer = sessions[number] + words(num_turn), words(num_answer)
            yield prompt, answer
            sessions[number] = prompt + answer


def compute(manager, tokens, num_found, ends, found=(), **options):
    for end in ends:
        if end > num_found:
            assert manager.allocate_slots("a", end, found) is not None
            manager.cache_blocks("a", tokens, end)
            manager.advance_state("a", end, **options)
            manager.end_step()
            found = ()


def found_share(manager, traffic):
    """The share of all tokens of prompts that are found, with states as the scheduler keeps them."""
    num_tokens = num_hits = 0
    for prompt, answer in prompts(*TRAFFIC[traffic]):
        found, num_found = manager.get_computed_blocks("a", prompt)
        last = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        compute(manager, prompt, num_found, sorted({*range(CHUNK, last, CHUNK), last, len(prompt)}), found)
        tokens = prompt + answer
        compute(manager, tokens, len(prompt), [len(tokens) // BLOCK_SIZE * BLOCK_SIZE], replaces_last=True)
        manager.free("a")
        num_tokens, num_hits = num_tokens + len(prompt), num_hits + num_found
    return num_hits / num_tokens


@pytest.mark.parametrize("percent", [11, 50, 85])
@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_found_by_the_share_of_states(benchmark, shape, traffic, percent):
    block_bytes, state_bytes, num_bytes = SHAPES[shape]
    num_states = num_bytes * percent // 100 // state_bytes
    num_blocks = (num_bytes - num_states * state_bytes) // block_bytes
    if num_blocks < max(len(prompt) + len(answer) for prompt, answer in prompts(*TRAFFIC[traffic])) // BLOCK_SIZE + 1:
        pytest.skip("the longest request needs more keys and values")

    def run():
        manager = KVCacheManager(num_blocks, BLOCK_SIZE, num_state_blocks=num_states)
        return found_share(manager, traffic)

    benchmark.extra_info["found"] = round(benchmark.pedantic(run, rounds=1), 2)
