"""Calls inside reasoning that was never closed, for every pair of parsers."""

from __future__ import annotations

import json

import pytest

from llmstack_output_parsers import REASONING_PARSERS, TOOL_PARSERS, ChainedParser
from llmstack_output_parsers.example_calls import EXAMPLE_CALLS, TOOLS
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import check_output_parser

# The start of reasoning, if it is not the start tag of the parser.
STARTS = {
    "gemma4": "<|channel>thought\n", "muse_glimmer": " to=self<|message|>", "openai": "<|channel|>analysis<|message|>",
    "openai_gptoss": "<|channel|>analysis<|message|>",
}  # fmt: skip
# Their calls have no marker, so they stand at the start of a message alone.
WITHOUT_MARKER = ("xlam",)
# It leaves all reasoning in the content, with its tag.
KEPT = "minimax_m2_append_think"


def chained(reasoning: str, form: str) -> ChainedParser:
    return ChainedParser(REASONING_PARSERS[reasoning](is_open=None), TOOL_PARSERS[form](TOOLS))


@pytest.mark.parametrize("reasoning", sorted(set(REASONING_PARSERS) - {KEPT}))
def test_a_call_inside_reasoning_that_was_never_closed_is_a_call(reasoning: str):
    start = STARTS.get(reasoning, REASONING_PARSERS[reasoning].start)
    for form in sorted(set(TOOL_PARSERS) - set(WITHOUT_MARKER)):
        text = f"{start}hm, well\n{EXAMPLE_CALLS[form]('Rome')}"
        found = check_output_parser(lambda: chained(reasoning, form), text, range(0, 300, 11))  # noqa: B023
        assert (found.reasoning.strip(), found.content.strip()) == ("hm, well", ""), form
        ((name, arguments),) = found.calls
        assert (name, json.loads(arguments)["city"]) == ("get_weather", "Rome"), form


@pytest.mark.parametrize("reasoning", sorted(set(REASONING_PARSERS) - {KEPT}))
def test_reasoning_that_only_names_the_start_of_a_call_stays_reasoning(reasoning: str):
    start = STARTS.get(reasoning, REASONING_PARSERS[reasoning].start)
    text = f"{start}I could write [TOOL_CALLS] or not"
    found = check_output_parser(lambda: chained(reasoning, "mistral"), text, range(0, 300, 11))
    assert (found.reasoning, found.content, found.calls) == ("I could write [TOOL_CALLS] or not", "", [])


def test_a_call_inside_reasoning_that_was_closed_is_none():
    call = EXAMPLE_CALLS["hermes"]("Rome")
    for answer in ("", "Yes"):
        text = f"<think>hm {call} no</think>{answer}"
        found = check_output_parser(lambda: chained("qwen3", "hermes"), text, range(0, 300, 11))
        assert (found.reasoning, found.content, found.calls) == (f"hm {call} no", answer, [])


def test_reasoning_is_held_up_to_a_bound():
    text = f"<think>hm <tool_call>{'x' * MAX_HELD_CHARS} <tool_call> y"
    found = check_output_parser(lambda: chained("qwen3", "hermes"), text, [9, 30, 200, 5000, MAX_HELD_CHARS])
    assert (found.reasoning, found.content, found.calls) == (text.removeprefix("<think>"), "", [])


def test_a_call_that_the_end_has_cut_inside_reasoning_is_completed():
    text = '<think>hm <tool_call>{"name": "now", "arguments": {"a": "b'
    found = check_output_parser(lambda: chained("qwen3", "hermes"), text, range(0, 300, 11))
    assert (found.reasoning, found.calls) == ("hm ", [("now", '{"a": "b"}')])


@pytest.mark.parametrize("name", ["glm45", "kimi_k2", "inkling"])
def test_the_start_of_a_call_is_no_content_where_no_parser_of_calls_follows(name: str):
    make = REASONING_PARSERS[name]
    start = {"glm45": "<tool_call>", "kimi_k2": "<|tool_calls_section_begin|>"}.get(
        name, "<|content_invoke_tool_json|>"
    )
    found = check_output_parser(lambda: make(is_open=True), f"hm{start}now", range(0, 50, 3))
    assert (found.reasoning, found.content) == ("hm", "now")
