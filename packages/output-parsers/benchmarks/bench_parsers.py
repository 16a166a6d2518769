"""What parsing costs per token: plain content, long arguments and reasoning, in pieces of a token's size."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from llmstack_output_parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser

NUM_TOKENS = 10_000
TOKEN_CHARS = 4
TOOLS = {"write": {"type": "object", "properties": {"text": {"type": "string"}}}}
PROSE = "The quick brown fox, it is said, jumps over <b>lazy</b> dogs [1] {2}.\n"
ARGUMENTS = json.dumps({"text": PROSE * (NUM_TOKENS * TOKEN_CHARS // len(PROSE))})
CALLS = {
    "hermes": f'<tool_call>{{"name": "write", "arguments": {ARGUMENTS}}}</tool_call>',
    "llama3_json": f'{{"name": "write", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS]write{ARGUMENTS}",
    "pythonic": f"[write(text={ARGUMENTS[9:-1]})]",
    "qwen3_coder": f"<function=write><parameter=text>{ARGUMENTS[10:-2]}</parameter></function>",
}


def tokens_of(text: str) -> list[str]:
    return [text[start : start + TOKEN_CHARS] for start in range(0, len(text), TOKEN_CHARS)]


def feed_all(parser: OutputParser, tokens: Sequence[str]) -> None:
    for token in tokens:
        parser.feed(token)
    parser.finish()


def run(benchmark: Any, make: Any, text: str) -> None:
    tokens = tokens_of(text)
    benchmark.pedantic(lambda: feed_all(make(), tokens), rounds=5, iterations=1)
    start = time.perf_counter()
    feed_all(make(), tokens)
    benchmark.extra_info["us_per_token"] = round((time.perf_counter() - start) / len(tokens) * 1e6, 2)


@pytest.mark.parametrize("form", sorted(CALLS))
def bench_content(benchmark: Any, form: str) -> None:
    run(benchmark, lambda: TOOL_PARSERS[form](TOOLS), PROSE * (NUM_TOKENS * TOKEN_CHARS // len(PROSE)))


@pytest.mark.parametrize("form", sorted(CALLS))
def bench_arguments(benchmark: Any, form: str) -> None:
    run(benchmark, lambda: TOOL_PARSERS[form](TOOLS), CALLS[form])


def bench_reasoning(benchmark: Any) -> None:
    text = PROSE * (NUM_TOKENS * TOKEN_CHARS // len(PROSE))
    run(benchmark, lambda: REASONING_PARSERS["think"](is_open=True), f"{text}</think>{text}")
