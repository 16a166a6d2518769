"""Response templates, as checkpoints have them, beside `parse_response` of transformers."""

from __future__ import annotations

import json
import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_output_parsers import ChainedParser, ParsedDelta, response_template
from llmstack_output_parsers.parser import ToolSchemas
from llmstack_output_parsers.response_template import parsers_of_template
from llmstack_output_parsers.template_fields import ResponseTemplateError, literal_start
from llmstack_output_parsers.template_values import MAX_PATTERN_S, limited

regex = pytest.importorskip("regex")
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}
JSON_CALLS = {
    "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}  # fmt: skip
PARAMETERS = {
    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
}
TEMPLATES: dict[str, dict[str, Any]] = {
    "objects": {"thinking": THINK, "tool_calls": JSON_CALLS, "content": {"close": "<|im_end|>"}},
    "tags": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "repeats": True,
            "content": "xml-inline", "content_args": PARAMETERS, "transform": FUNCTION,
        },
        "content": {},
    },
    "an array between tokens": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
    "bare keys": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json", "transform": FUNCTION,
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
    "calls of Python": {
        "tool_calls": {
            "open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "content": "python-call-list",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
    "lines": {
        "tool_calls": {
            "open_pattern": r"\[CALL (?P<name>\w+)\]", "close": "[/CALL]", "repeats": True, "content": "kv-lines",
            "content_args": {"kv_sep": "="}, "transform": FUNCTION,
        },
        "content": {},
    },
}  # fmt: skip
SEARCH = ("search", {"query": "a } b", "limit": 3, "deep": [True, None]})
PLAIN = ("search", {"query": "weather in Paris"})
TOOLS: ToolSchemas = {"search": {}, "stop": {}, "a": {}}
SEARCH_TEXT = json.dumps({"name": SEARCH[0], "arguments": SEARCH[1]})
CASES = [
    ("objects", "<think>\nTwo.\n</think>\n\nYes.", "Two.", "Yes.", []),
    (
        "objects",
        (f"<think>Calls.</think>So: <tool_call>\n{SEARCH_TEXT}\n</tool_call>"
        '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'),
        "Calls.", "So:", [SEARCH, ("stop", {})],
    ),
    (
        "tags",
        ("<think>x</think>\n<tool_call>\n<function=search>\n<parameter=query>\na } b\n</parameter>\n"
        "<parameter=limit>3</parameter><parameter=deep>[true, null]</parameter></function>\n</tool_call>"),
        "x", "", [SEARCH],
    ),
    ("an array between tokens", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "", "Hello.", []),
    (
        "an array between tokens",
        ("<|START_THINKING|>I call.<|END_THINKING|><|START_ACTION|>[\n"
        f'{{"tool_call_id": "0", "tool_name": "search", "parameters": {json.dumps(SEARCH[1])}}},'
        f'{{"tool_call_id": "1", "tool_name": "search", "parameters": {json.dumps(PLAIN[1])}}}]<|END_ACTION|>'),
        "I call.", "", [SEARCH, PLAIN],
    ),
    (
        "bare keys",
        ('<|channel>thought\nHm.<channel|><|tool_call>call:search{query:<|"|>a } b<|"|>,limit:3,deep:[true,null]}'
        "<tool_call|>"),
        "Hm.", "", [SEARCH],
    ),
    (
        "calls of Python",
        ("Now.<|tool_call_start|>[search(query='a } b', limit=3, deep=[True, None]), "
        'search(query="weather in Paris")]'
        "<|tool_call_end|>"),
        "", "Now.", [SEARCH, PLAIN],
    ),
    ("lines", "[CALL search]\nquery=weather in Paris\n[/CALL]", "", "", [PLAIN]),
]  # fmt: skip


def template(name: str) -> dict[str, Any]:
    return {"version": 1, "start_anchor": "<|assistant|>", "fields": TEMPLATES[name]}


def parsed(name: str, pieces: list[str], tools: ToolSchemas) -> tuple[str, str, list[tuple[str, Any]]]:
    parsers = parsers_of_template(template(name))
    assert parsers.tools is not None
    parser: Any = parsers.tools(tools)
    if parsers.reasoning is not None:
        parser = ChainedParser(parsers.reasoning(is_open=None), parser)
    deltas: list[ParsedDelta] = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        names[call.index] = call.name or names[call.index]
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    calls = [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    content = "".join(delta.content for delta in deltas)
    return "".join(delta.reasoning for delta in deltas).strip(), content.strip(), calls


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), CASES)
def test_a_message_is_that_of_transformers(
    name: str, text: str, reasoning: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    message = chat_parsing.parse_response(text, template(name), prefix="")
    theirs = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    thought = message.get("thinking", message.get("reasoning_content", ""))
    assert (thought, message.get("content", ""), theirs) == (reasoning, content, calls)
    assert parsed(name, [text], TOOLS) == (reasoning, content, calls)
    assert parsed(name, list(text), TOOLS) == (reasoning, content, calls)


@pytest.mark.parametrize("num_chars", [65_500, 65_536, 70_000])
def test_a_long_text_is_a_call_or_content_however_it_is_divided(num_chars: int) -> None:
    text = f"[CALL f]a={'x' * num_chars}[/CALL][CALL g]a=b[/CALL]"
    whole = parsed("lines", [text], {})
    assert whole == parsed("lines", [text[start : start + 1000] for start in range(0, len(text), 1000)], {})
    assert len(whole[2]) == (2 if num_chars == 65_500 else 1)


@given(st.sampled_from(CASES), st.lists(st.integers(min_value=0, max_value=10_000), max_size=8))
def test_the_division_of_a_text_does_not_matter(case: tuple[str, str, str, str, Any], cuts: list[int]) -> None:
    name, text, *expected = case
    assert parsed(name, pieces_of(text, cuts), TOOLS) == tuple(expected)


def test_a_value_is_what_its_schema_says() -> None:
    text = "[CALL add]\nfirst=7\nsecond=7\n[/CALL]"
    tools = {"add": {"properties": {"first": {"type": "integer"}, "second": {"type": "string"}}}}
    assert parsed("lines", [text], tools) == ("", "", [("add", {"first": 7, "second": "7"})])


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=st.text(alphabet="<>|tool_calrhinkSTAEDGP={}[]():,\"'/\\ \n\x01a0"))
def test_any_text_is_parsed(name: str, text: str) -> None:
    assert parsed(name, list(text), TOOLS) == parsed(name, [text], TOOLS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tags", "<tool_call><function=f>" + "<parameter=a>" * 4_900 + "</tool_call>"),
        ("bare keys", "<|tool_call>call:f{" + '\\"' * 32_000 + "<tool_call|>"),
        ("bare keys", "<|tool_call>call:f{" + "a" * 65_000 + "<tool_call|>"),
        ("bare keys", "<|tool_call>call:f{" + '<|"|>' * 12_000 + "<tool_call|>"),
        ("calls of Python", "<|tool_call_start|>" + "[" * 60_000 + "<|tool_call_end|>"),
        ("objects", "<tool_call>" + "[" * 200_000),
        ("lines", "[CALL f]" + "x" * 200_000),
    ],
)  # fmt: skip
def test_no_text_takes_long(name: str, text: str) -> None:
    """Each of these takes minutes where a pattern, or a quote that is missing, is searched again and again."""
    assert parsed(name, pieces_of(text, list(range(0, len(text), 997))), {})[2] == []


def test_all_characters_in_front_of_a_call_have_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<tool_call>" + " " * 400 + "<function=add></tool_call>"
    assert parsed("tags", [text], {})[2] == [("add", {})]
    ticks = count()
    monkeypatch.setattr(response_template, "thread_time", lambda: next(ticks) / 100)  # each match takes 10 ms
    _, content, calls = parsed("tags", [text], {})
    assert (content, calls) == (text, [])
    assert next(ticks) <= 12


def test_a_thread_that_stalls_within_a_match_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stalls = regex.compile, [2 * MAX_PATTERN_S]

    def compiled(pattern: str, flags: int = 0) -> SimpleNamespace:
        real = made(pattern, flags)

        def match(text: str, **options: Any) -> Any:
            time.sleep(stalls.pop() if stalls else 0.0)
            return real.match(text, **options)

        return SimpleNamespace(match=match, finditer=real.finditer, groupindex=real.groupindex)

    monkeypatch.setattr(regex, "compile", compiled)
    assert parsed("tags", ["<tool_call><function=add></tool_call>"], {})[2] == [("add", {})]
    assert not stalls


def test_a_match_that_other_threads_have_ended_is_begun_again() -> None:
    ends = [True, True, False]

    def match(text: str, timeout: float) -> str:
        if ends.pop(0):
            raise TimeoutError
        return f"{text} within {timeout}"

    assert limited(match, "found", limit_s=5.0) == "found within 5.0"
    assert ends == []


def test_a_match_that_takes_its_time_itself_is_ended() -> None:
    pattern = regex.compile(r"(a|aa)*(b|bb|a)*(a?)*c(?=d)")
    with pytest.raises(TimeoutError):
        limited(pattern.match, "a" * 64 + "c")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "no fields"),
        ({"tool_calls": {"open": "<a>", "content": "yaml"}}, "unknown content"),
        ({"tool_calls": {"open": "<a>", "shape": 1}}, "unknown settings"),
        ({"tool_calls": {"open_pattern": r"(?:^|<a>)"}}, "pattern without a text"),
        ({"tool_calls": {"open_pattern": r"<a>(?P<name>"}}, "malformed pattern"),
        ({"tool_calls": {"open": "<a>", "close_pattern": "b"}}, "ends by a pattern"),
        ({"tool_calls": {"open": ["<a>", "[b]"]}}, "begin differently"),
        ({"tool_calls": {"open": [""]}}, "no texts"),
        ({"tool_calls": {"content": "json"}}, "no text in front"),
        ({"tool_calls": {"open": "<a>", "content": "xml-inline", "content_args": {"tag_pattern": "x"}}}, "'key'"),
        ({"tool_calls": {"open": "<a>", "content": "kv-lines", "content_args": {"value_parser": "json"}}}, "values of"),
        (
            {"tool_calls": {"open": "<a>", "content": "kv-lines", "content_args": {"value_parser": {"name": "yaml"}}}},
            "values of an unknown form",
        ),
        ({"tool_calls": {"open": "<a>", "content": "kv-lines", "content_args": {"kv_sep": ""}}}, "separator"),
        (
            {"tool_calls": {"open": "<a>", "content": "json", "content_args": {"string_delims": [["", ""]]}}},
            "separator",
        ),
        ({"tool_calls": {"open": "<a>", "content": "json", "content_args": {"string_delims": [["a"]]}}}, "pairs"),
        (
            {
                "tool_calls": {
                    "open": "<a>",
                    "content": "kv-lines",
                    "content_args": {"value_parser": {"name": "xml-inline", "args": {"tag_pattern": "("}}},
                }
            },
            "malformed pattern",
        ),
        ({"thinking": {"open": "<a>"}}, "both sides"),
        ({"tool_calls": {"open": "<a>", "content": "python-call-list", "transform": {}}}, "another form"),
    ],
)
def test_a_form_that_is_not_read_is_named(fields: Any, reason: str) -> None:
    with pytest.raises(ResponseTemplateError, match=reason):
        parsers_of_template({"fields": fields})
    with pytest.raises(ResponseTemplateError, match="version"):
        parsers_of_template({"version": 2, "fields": {}})


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r"<\|tool>call:(\w+)", "<|tool>call:"),
        (r"<a>\s*b", "<a>"),
        ("<a>b*", "<a>"),
        ("ab|c", ""),
        (r"\w", ""),
        ("a", "a"),
    ],
)
def test_texts_in_front_of_patterns(pattern: str, literal: str) -> None:
    assert literal_start(pattern) == literal
