"""Batching, chunking, prefix hits and preemption change no answer; many streams advance together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

STARTS = ("Once upon a time", "The king", "A little fox", "In the wood")
MIDDLES = ("there was", "and the queen", "who lived by the sea and never went home before dark", "ran")
PROMPTS = [f"{start} {middle}" for start in STARTS for middle in MIDDLES]
ARGUMENTS: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "extra_body": {"ignore_eos": True}}


def greedy_one_by_one(server: Any, model: str) -> list[str]:
    return [
        server.client.completions.create(model=model, prompt=prompt, **ARGUMENTS).choices[0].text for prompt in PROMPTS
    ]


def greedy_together(server: Any, model: str) -> list[str]:
    answer = server.client.completions.create(model=model, prompt=PROMPTS, **ARGUMENTS)
    return [choice.text for choice in answer.choices]


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Any]) -> list[str]:
    with serve("--dtype", "float32", "--no-enable-prefix-caching") as server:
        return greedy_one_by_one(server, server.client.models.list().data[0].id)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--max-num-batched-tokens", "16", "--max-num-seqs", "16"), marks=pytest.mark.full),
        pytest.param(("--num-kv-blocks", "24", "--max-model-len", "128", "--block-size", "8"), marks=pytest.mark.full),
        ("--num-kv-blocks", "24", "--max-model-len", "128", "--block-size", "8", "--num-host-blocks", "64"),
        pytest.param(("--no-enable-prefix-caching", "--no-enable-chunked-prefill"), marks=pytest.mark.full),
        ("--async-scheduling", "--max-num-partial-prefills", "2", "--long-prefill-token-threshold", "8"),
    ],
    ids=["plain", "tiny chunks", "preemption", "swap", "whole prompts", "scheduling ahead"],
)
def test_answers_do_not_change_with_the_batch(
    serve: Callable[..., Any], alone: list[str], flags: tuple[str, ...]
) -> None:
    with serve("--dtype", "float32", *flags) as server:
        model = server.client.models.list().data[0].id
        assert greedy_together(server, model) == alone
        assert greedy_together(server, model) == alone  # now with prefix hits
        preemptions = server.metric("llmstack:num_preemptions_total")
        assert (preemptions > 0) == ("--num-kv-blocks" in flags)


def test_256_streams_are_open_at_once_and_all_finish(serve: Callable[..., Any]) -> None:
    """Without a limit of the predicted wait, which a slow machine would reach."""
    with serve("--max-queue-wait", "0") as server:
        check_256_streams(server)


def check_256_streams(server: Any) -> None:
    model = server.client.models.list().data[0].id

    async def run() -> tuple[int, int]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        num_open = most_open = 0

        async def one(index: int) -> str | None:
            nonlocal num_open, most_open
            stream = await client.completions.create(
                model=model, prompt=f"Story {index}:", max_tokens=24, stream=True, extra_body={"ignore_eos": True}
            )
            reason, is_first = None, True
            async for chunk in stream:
                if is_first:
                    is_first = False
                    num_open += 1
                    most_open = max(most_open, num_open)
                reason = chunk.choices[0].finish_reason
            num_open -= 1
            return reason

        reasons = await asyncio.gather(*(one(i) for i in range(256)))
        await client.close()
        return reasons.count("length"), most_open

    num_finished, most_open = asyncio.run(run())
    assert num_finished == 256
    assert most_open > 64
    assert server.metric("llmstack:num_requests_running") == 0
