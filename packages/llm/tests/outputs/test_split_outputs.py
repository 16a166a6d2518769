"""Requests whose tokens are an output each: nothing but the cuts is another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_helpers.output_bench import DELTA, TOKENIZER, Bench, taken

from llmstack_llm.outputs.collector import RequestOutputCollector, merged
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_types import EngineCoreOutput, FinishReason, TokenLogprobs


def outputs_of(stream: RequestOutputCollector) -> list[RequestOutput]:
    found = []
    while (output := stream.get_nowait()) is not None:
        found.append(output)
    return found


def say(bench: Bench, text: str, sizes: Sequence[int], finish_reason: FinishReason) -> None:
    """The text in steps of so many tokens, and the last ones in one step."""
    token_ids = TOKENIZER.encode(text)
    position, is_first = 0, True
    for size in [*sizes, len(token_ids)]:
        some = token_ids[position : position + size]
        position += len(some)
        is_last = position == len(token_ids)
        logprobs = [TokenLogprobs((one,), (-1.0,), 1) for one in some]
        bench.step(
            EngineCoreOutput(
                "r", some, logprobs, [None] if is_first else None, finish_reason if is_last else None,
                num_cached_tokens=0 if is_first else -1,
            )
        )  # fmt: skip
        is_first = False
        if is_last:
            return


@pytest.mark.parametrize("fields", [{}, {"stop": ["ab"]}, {"stop": ["b"], "min_tokens": 4}, {"stream_interval": 3}])
@given(st.text("abé😀", min_size=1, max_size=12), st.lists(st.integers(1, 4), max_size=6), st.booleans())
def test_put_together_they_are_what_comes_in_one(fields: Any, text: str, sizes: list[int], is_stopped: bool):
    reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    fields = {"output_kind": DELTA, "logprobs": 0, "prompt_logprobs": 0} | fields
    whole, split = Bench(), Bench()
    streams = whole.add(**fields), split.add(**fields, is_split=True)
    for bench in (whole, split):
        say(bench, text, sizes, reason)
    expected = taken(streams[0])
    found = outputs_of(streams[1])
    assert all(len(output.outputs[0].token_ids) == 1 for output in found)
    assert [output.prompt_logprobs is not None for output in found] == [True] + [False] * (len(found) - 1)
    together = found[0]
    for output in found[1:]:
        together = merged(together, output)
    (one,), (other,) = together.outputs, expected.outputs
    assert (one, together.finished) == (other, expected.finished)
    assert (together.prompt_logprobs, together.num_cached_tokens) == (expected.prompt_logprobs, 0)
    assert set(whole.to_abort) <= set(split.to_abort)  # the engine core ignores what has ended there already
