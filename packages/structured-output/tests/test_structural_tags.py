"""Tags amid text, and calls of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmstack_structured_output import GrammarCompiler, tagged_tool_calls, tool_calls_schema
from llmstack_types import InvalidRequestError, StructuredOutputsParams

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "integer"}},
}
NOTHING = {"type": "object", "additionalProperties": False}
FUNCTIONS = [("point", POINT), ("stop", NOTHING)]


def is_complete(compiler: GrammarCompiler, text: str, **constraint: Any) -> bool:
    matcher = compiler.compile(StructuredOutputsParams(**constraint)).new_matcher()
    return matcher.accept(text.encode()) and matcher.is_complete


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


TEXT = {"type": "any_text"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", TEXT, "</a>")]}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"structures": [{"begin": "<f=a>", "schema": NOTHING, "end": "</f>"}], "triggers": ["<f="]},
        ["hello", "", "x <f=a>{}</f> y <f=a>{}</f>"],
        ["<f=b>{}</f>", "<f=a>{", "<f=a>[]</f>"],
    ),
    ({"format": {"type": "const_string", "value": 'a "b"'}}, ['a "b"'], ["a", "b"]),
    ({"format": {"type": "regex", "pattern": "^[a-z]+/[0-9]$"}}, ["ab/1"], ["ab1", "ab/12"]),
    ({"format": {"type": "regex", "pattern": r"\d\/\\/"}}, ["1/\\/"], ["٣/\\/", "1/\\"]),
    ({"format": {"type": "regex", "pattern": "a\nb"}}, ["a\nb"], ["ab"]),
    ({"format": {"type": "choice", "choices": ["a b", "\n"]}}, ["a b", "\n"], ["a", ""]),
    ({"format": schema(NOTHING)}, ["{}"], ["[]"]),
    (
        {"format": {"type": "sequence", "elements": [tag("<think>", TEXT, "</think>"), schema(NOTHING)]}},
        ["<think>a < b</think>{}", "<think></think>{}"],
        ["{}", "<think>x</think>", "<think>x</think>{} y"],
    ),
    ({"format": {"type": "or", "elements": [schema(NOTHING), TEXT]}}, ["{}", "free text"], []),
    (
        {"format": {**TRIGGERED, "at_least_one": True}},
        ["x<a>y</a>", "<a>1</a><a>2</a> z"],
        ["x", "<b>"],
    ),
    (
        {"format": {**TRIGGERED, "stop_after_first": True}},
        ["x<a>y</a>", "free"],
        ["<a>1</a> z", "<b>"],
    ),
    (
        {"format": {"type": "tags_with_separator", "separator": ", ", "tags": [tag("[", schema(NOTHING), "]")]}},
        ["", "[{}]", "[{}], [{}]"],
        ["[{}][{}]", "x", "[{}], "],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("value", "good", "bad"), FORMATS, ids=lambda value: str(value)[:50])
def test_a_format_allows_what_it_describes(
    compiler: GrammarCompiler, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    constraint = {"structural_tag": {"type": "structural_tag", **value}}
    assert [text for text in good if not is_complete(compiler, text, **constraint)] == []
    assert [text for text in bad if is_complete(compiler, text, **constraint)] == []


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "json_schema"},
        {"structures": "x", "triggers": ["<"]},
        {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]},
        {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["["]},
        {"structures": [{"begin": "<a>", "schema": {"type": "objekt"}, "end": "</a>"}], "triggers": ["<"]},
        {"structures": [{"begin": 1, "schema": {}, "end": "</a>"}], "triggers": ["<"]},
        {"format": {"type": "qwen_xml_parameter", "json_schema": {}}},
        {"format": {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "x"}]}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "regex", "pattern": "[a"}},
        {"format": tag("<a>", TEXT, "")},
        {"format": tag("<a>", TEXT, ["x", "y"])},
        {"format": None},
    ],
    ids=str,
)
def test_what_is_no_format_is_refused(compiler: GrammarCompiler, value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(structural_tag=value))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert caught.value.code == "invalid_json_schema"


def call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_an_array_of_calls_keeps_to_the_schemas_of_the_functions(compiler: GrammarCompiler) -> None:
    calls = tool_calls_schema(FUNCTIONS)
    assert is_complete(compiler, f"[{call('point', {'at': 3})}, {call('stop', {})}]", json=calls)
    for text in ("[]", f"[{call('point', {})}]", f"[{call('point', {'at': 'x'})}]", f"[{call('run', {})}]"):
        assert not is_complete(compiler, text, json=calls)
    two = f"[{call('stop', {})}, {call('stop', {})}]"
    assert is_complete(compiler, two, json=calls)
    assert not is_complete(compiler, two, json=tool_calls_schema(FUNCTIONS, max_calls=1))


def test_tagged_calls_stand_amid_text(compiler: GrammarCompiler) -> None:
    tags = tagged_tool_calls(FUNCTIONS, begin="<tool_call>\n", end="\n</tool_call>")
    one = f"<tool_call>\n{call('point', {'at': 3})}\n</tool_call>"
    for text in ("nothing to call", one, f"let me see {one} and {one}."):
        assert is_complete(compiler, text, structural_tag=tags)
    assert not is_complete(compiler, "<tool_call>\n{}\n</tool_call>", structural_tag=tags)


def test_required_calls_are_all_that_is_said(compiler: GrammarCompiler) -> None:
    one = f"<call>{call('stop', {})}</call>"
    several = tagged_tool_calls(FUNCTIONS, begin="<call>", end="</call>", is_required=True)
    single = tagged_tool_calls(FUNCTIONS, begin="<call>", end="</call>", is_required=True, is_parallel=False)
    assert is_complete(compiler, one + one, structural_tag=several)
    assert is_complete(compiler, one, structural_tag=single)
    assert not is_complete(compiler, one + one, structural_tag=single)
    assert not is_complete(compiler, f"well {one}", structural_tag=several)


def test_the_keys_of_a_call_are_the_models_own(compiler: GrammarCompiler) -> None:
    calls = tool_calls_schema([("stop", NOTHING)], name_key="function", arguments_key="parameters")
    assert is_complete(compiler, '[{"function": "stop", "parameters": {}}]', json=calls)


INTEGERS = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, ["[1,2]", "[1, 2]", "[1,\n  2]"], ["[1,  2]", "[1,\t2]"]),
        ({"disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"whitespace_pattern": r"\s\s"}, ["[1,2]", "[1,\t 2]"], ["[1, 2]"]),
    ],
    ids=str,
)
def test_white_space_in_tags_is_that_of_a_whole_text(
    compiler: GrammarCompiler, options: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for constraint in (
        {"json": INTEGERS},
        {"structural_tag": {"format": schema(INTEGERS)}},
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": INTEGERS, "end": "</a>"}], "triggers": ["<a>"]}},
    ):
        form = "<a>{}</a>" if "structures" in str(constraint) else "{}"
        assert [text for text in good if not is_complete(compiler, form.format(text), **constraint, **options)] == []
        assert [text for text in bad if is_complete(compiler, form.format(text), **constraint, **options)] == []
