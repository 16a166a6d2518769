"""Chats about pictures and sounds with a server, and checks of any kind of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.offline.llm import LLM
from llmstack_types import SamplingParams

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = ("--dtype", "float32", "--served-model-name", "m", "--max-queue-wait", "0")
"""On a busy machine a server would refuse what tests ask at once, since its first tokens would come late."""

Seeds = tuple[int, ...]
Parts = Callable[..., Any]
"""The content of a message with items of these seeds, and a question if one is given."""


def ask(server: Any, content: Any, **fields: Any) -> Any:
    """A greedy answer with the ids of its tokens."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    return server.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": content}], temperature=0,
        max_tokens=fields.pop("max_tokens", NUM_TOKENS), extra_body=extra, **fields,
    )  # fmt: skip


def tokens(answer: Any, index: int = 0) -> list[int]:
    """The ids of the tokens of one choice."""
    return list(answer.choices[index].token_ids)


def check_answers(server: Any, parts: Parts, reference: Mapping[Seeds, list[int]], num_turns: int) -> Any:
    """Answers are those of a reference alone, together and with `n`; returns the usage of the items 0 and 1, found."""
    assert {seeds: tokens(ask(server, parts(seeds))) for seeds in reference} == reference
    found = ask(server, parts((0, 1)))
    assert tokens(found) == reference[0, 1]
    assert found.usage.prompt_tokens_details.cached_tokens > 0
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda seeds: tokens(ask(server, parts(seeds))), [*reference] * num_turns))
    assert many == [*reference.values()] * num_turns
    several = ask(server, parts((1,)), n=3)
    assert [tokens(several, index) for index in range(3)] == [reference[(1,)]] * 3
    return found.usage.prompt_tokens_details


def check_second_request(server: Any, parts: Parts, names: list[str], seed: int, new_seed: int) -> dict[str, Any]:
    """A second request with an item changes no counter of `names`; returns the facts of one with a new item."""
    ask(server, parts((seed,)))
    before = [server.metric(f"llmstack:{name}_total") for name in names]
    hits = server.metric("llmstack:media_lookup_hits_total")
    answer = ask(server, parts((seed,), "another question about it?"))
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert [server.metric(f"llmstack:{name}_total") for name in names] == before
    assert server.metric("llmstack:media_lookup_hits_total") == hits + 1
    new = ask(server, parts((new_seed,)))
    after = [server.metric(f"llmstack:{name}_total") for name in names[:2]]  # a small one takes no measured time
    assert all(more > less for more, less in zip(after, before, strict=False))
    assert server.metric("llmstack:media_lookup_hits_total") == hits + 1
    facts = [server.get_json(f"/v1/requests/{one.id}/explanation")["facts"] for one in (answer, new)]
    assert [(one["media_in_encoder_cache"], one["media_encoded"]) for one in facts] == [(1, 0), (0, 1)]
    found: dict[str, Any] = facts[1]
    return found


def check_killed_core(server: Any, parts: Parts, reference: Mapping[Seeds, list[int]]) -> None:
    """Answers are those of a reference though the engine core is killed while they are generated."""
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, server, parts(seeds)) for seeds in [*reference] * 4]
        server.wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, "the first tokens")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [tokens(one.result()) for one in waiting] == [*reference.values()] * 4


@pytest.fixture(scope="module")
def offline_llm(folder: Path) -> Iterator[LLM]:
    """The model of the module's `folder`, in this process."""
    with LLM(str(folder), dtype="float32") as one:
        yield one


def offline_tokens(outputs: Any) -> list[list[int]]:
    """The ids of the tokens of each output."""
    return [list(one.outputs[0].token_ids) for one in outputs]
