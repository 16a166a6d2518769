"""Beginnings of prompts: which are distinguished, and how many are remembered."""

from __future__ import annotations

from llmstack_engine_core.client.affinity import PREFIX_LENGTHS, PrefixAffinity, prefixes_of
from llmstack_types import EngineCoreRequest, SamplingParams


def prefixes(num_tokens: int, *changed: int, **fields: str) -> list[int]:
    prompt = list(range(num_tokens))
    for place in changed:
        prompt[place] += 1
    return prefixes_of(EngineCoreRequest("r", prompt, SamplingParams(), **fields))


def test_a_short_prompt_has_no_beginning_worth_a_preference() -> None:
    assert prefixes(63) == []
    assert [len(prefixes(length)) for length in PREFIX_LENGTHS] == [1, 2, 3, 4, 5]


def test_prompts_share_the_beginnings_before_their_first_difference() -> None:
    whole = prefixes(1100)
    assert prefixes(1100, 1050) == whole
    assert prefixes(1100, 300)[:2] == whole[:2]
    assert prefixes(1100, 300)[2] != whole[2]
    assert not set(prefixes(1100, 0)) & set(whole)


def test_tenants_and_adapters_share_nothing() -> None:
    assert not set(prefixes(300)) & set(prefixes(300, cache_salt="s"))
    assert not set(prefixes(300)) & set(prefixes(300, lora_name="a"))


def test_the_least_recently_used_are_forgotten() -> None:
    affinity = PrefixAffinity(max_prefixes=3)
    affinity.note([1, 2], 0)
    affinity.note([3], 1)
    affinity.note([1], 0)
    affinity.note([4], 2)
    assert [affinity.find([prefix]) for prefix in (1, 2, 3, 4)] == [0, None, 1, 2]
    affinity.clear()
    assert affinity.find([1, 3, 4]) is None
