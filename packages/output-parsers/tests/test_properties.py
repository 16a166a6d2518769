"""What holds for every parser and every text: any chunking, linear time, bounded memory, nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_output_parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ChainedParser,
    NamedCallParser,
    OutputParser,
    Parser,
    RequiredCallsParser,
)
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import check_output_parser, parse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"get_weather": SCHEMA, "now": {}}
FORMS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
MAKERS: dict[str, Callable[[], OutputParser]] = {
    **{name: lambda make=TOOL_PARSERS[name]: make(TOOLS) for name in FORMS},
    "think": lambda: REASONING_PARSERS["think"](is_open=None),
    "think, opened": lambda: REASONING_PARSERS["think"](is_open=True),
    "deepseek_r1": lambda: REASONING_PARSERS["deepseek_r1"](is_open=None),
    "think, then hermes": lambda: ChainedParser(
        REASONING_PARSERS["think"](is_open=None), TOOL_PARSERS["hermes"](TOOLS)
    ),
    "required": RequiredCallsParser,
    "named": lambda: NamedCallParser("now"),
}
FRAGMENTS = [
    "<tool_call>", "</tool_call>", '{"name": "get_weather"', '"arguments": {', '"parameters": {"city": "a"', "}", "}}",
    '{"name": "now", "arguments": {}}', ", ", "[", "]", ";", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "now", "get_weather(", "city=", "'a\\'b'", "days=3", ")", "<function=now>", "<function=get_weather>",
    "<parameter=city>", "<parameter=days>", "</parameter>", "</function>", "\n", " 12\n", "<think>", "</think>",
    "[THINK]", "[/THINK]", "<|python_start|>", "null", "True", "{'a': [1, (2,)]}",
]  # fmt: skip


def texts() -> st.SearchStrategy[str]:
    """Texts that look like calls: fragments of their notation, whole or cut short, amid other characters."""
    fragment = st.sampled_from(FRAGMENTS)
    beginning = st.builds(lambda text, end: text[:end], fragment, st.integers(1, 12))
    anything = st.text(st.sampled_from("ab <>[]{}()\"'\\,:=/\n1.") | st.characters(), max_size=6)
    return st.lists(st.one_of(fragment, fragment, fragment, beginning, anything), max_size=14).map("".join)


every_parser = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_parser
@given(text=texts(), places=st.lists(st.integers(0, 120), max_size=12))
def test_however_a_text_is_cut_the_same_comes_of_it(make: Callable[[], OutputParser], text: str, places: list[int]):
    check_output_parser(make, text, places)


@every_parser
@given(text=st.text())
def test_a_text_without_notation_is_content_as_it_stands(make: Callable[[], OutputParser], text: str):
    plain = text.translate({ord(character): "x" for character in "<[{("})
    found = parse(make(), [plain])
    if found.calls or found.reasoning:  # a named function takes all text, and R1 reasons by default
        assert "".join([found.reasoning, *(arguments for _, arguments in found.calls)]) in plain
    elif plain.strip():
        assert found.content == plain


def json_values() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(codec="utf-8"), max_size=8)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


arguments_objects = st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), json_values())


@given(calls=st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), arguments_objects), min_size=1, max_size=3))
@pytest.mark.parametrize("is_ascii", [False, True])
def test_calls_come_out_as_they_were_written(calls: list[tuple[str, dict[str, Any]]], is_ascii: bool):
    objects = [json.dumps({"name": name, "arguments": value}, ensure_ascii=is_ascii) for name, value in calls]
    expected = [(name, json.dumps(value, ensure_ascii=is_ascii)) for name, value in calls]
    forms = {
        "hermes": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "required": f"[{', '.join(objects)}]",
    }
    for form, text in forms.items():
        assert parse(MAKERS[form](), [text]).calls == expected
    named = "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in expected)
    assert parse(MAKERS["mistral"](), [named]).calls == expected


@given(
    name=st.sampled_from(sorted(TOOLS)),
    keywords=st.dictionaries(st.from_regex("[a-z_][a-z0-9_]{0,8}", fullmatch=True), json_values(), max_size=4),
)
def test_python_calls_come_out_with_the_values_they_were_written_with(name: str, keywords: dict[str, Any]):
    text = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
    ((called, arguments),) = parse(MAKERS["pythonic"](), [f"[{name}({text})]"]).calls
    assert (called, json.loads(arguments)) == (name, keywords)


# Texts that would cost a parser that looks back, or searches ahead, the square of their length.
HARD_TEXTS = {
    "markers": lambda: itertools.cycle(["<tool_call>", "[TOOL_CALLS]", "<think>", "<|python_tag|>", "[THINK]"]),
    "beginnings of markers": lambda: itertools.cycle(["<tool_cal", "[TOOL_CALL", "<thin", "<function", "<parameter"]),
    "angle brackets": lambda: itertools.repeat("<"),
    "functions": lambda: itertools.repeat("<function=now>"),
    "names that are none": lambda: itertools.repeat("<function="),
    "one long value": lambda: itertools.chain(["<tool_call><function=f><parameter=a>"], itertools.repeat("x</para")),
    "one long string": lambda: itertools.chain(
        ['<tool_call>{"name": "now", "arguments": {"a": "'], itertools.repeat("\\")
    ),
    "arguments before the name": lambda: itertools.chain(['<tool_call>{"arguments": {"a": "'], itertools.repeat("xyz")),
    "keys": lambda: itertools.chain(["<tool_call>{"], itertools.repeat('"id": 1, ')),
    "calls that break off": lambda: itertools.repeat('<tool_call>{"name": "now", "arguments": '),
    "Mistral's": lambda: itertools.repeat('[TOOL_CALLS][{"name": "now", "arguments": {}},'),
    "Llama's": lambda: itertools.chain(["{"], itertools.repeat('"type": "x", ')),
    "Python's": lambda: itertools.chain(["[now(a="], itertools.repeat("['x', ")),
    "Python's strings": lambda: itertools.chain(["[now(a='"], itertools.repeat("\\u00")),
    "nesting": lambda: itertools.chain(['<tool_call>{"name": "now", "arguments": {"a": '], itertools.repeat("[")),
    "white space": lambda: itertools.repeat(" \n"),
    "white space in a call": lambda: itertools.chain(["<tool_call>"], itertools.repeat(" ")),
    "line ends in reasoning": lambda: itertools.chain(["<think>x"], itertools.repeat("\n")),
}
NUM_CHARS = MAX_HELD_CHARS + 4096
# A character may be looked at once as itself, and once for each marker that it might begin or belong to.
MAX_VISITS_PER_CHAR = 60


def pieces_of(fragments: Iterator[str], num_chars: int, piece_chars: int) -> Iterable[str]:
    text = ""
    while len(text) < num_chars:
        text += next(fragments)
    return [text[start : start + piece_chars] for start in range(0, num_chars, piece_chars)]


@pytest.mark.parametrize("piece_chars", [5, NUM_CHARS])
@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS.keys())
def test_characters_are_visited_a_bounded_number_of_times_and_held_up_to_a_bound(
    text: Callable[[], Iterator[str]], piece_chars: int
):
    for name in (*FORMS, "think"):
        parser = MAKERS[name]()
        assert isinstance(parser, Parser)
        num_fed = num_said = 0
        for piece in pieces_of(text(), NUM_CHARS, piece_chars):
            delta = parser.feed(piece)
            num_fed += len(piece)
            num_said += (
                len(delta.content) + len(delta.reasoning) + sum(len(call.arguments) for call in delta.tool_calls)
            )
        assert parser.reader.num_visited <= MAX_VISITS_PER_CHAR * num_fed, name
        assert parser.num_held_chars <= MAX_HELD_CHARS + 512, name
