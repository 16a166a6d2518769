"""What each form of calls becomes; every text is parsed whole and one character at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from llmstack_output_parsers import TOOL_PARSERS, NamedCallParser, RequiredCallsParser
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import FoldedMessage, check_output_parser, parse

WEATHER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array"},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "free": {},
    },
}
TOOLS: Mapping[str, Mapping[str, Any]] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}

PARIS = ("get_weather", '{"city": "Paris"}')
NOW = ("now", "{}")


def parsed(form: str, text: str) -> FoldedMessage:
    return check_output_parser(lambda: TOOL_PARSERS[form](TOOLS), text)


CALLS = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS]),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>\n<tool_call>{"name":"now"}</tool_call>\n', [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}\n{"name": "now"}\n</tool_call>', [NOW, NOW]),
    ("hermes", '<tool_call>{"id": [1, {"a": "}"}], "name": "now", "arguments": {}, "x": 1.5}', [NOW]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>', [NOW]),
    ("qwen3", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', [("other", "{}")]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ("llama3_json", ' <|python_tag|>{"type": "function", "name": "now", "arguments": {}}', [NOW]),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [NOW, NOW]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', [NOW, NOW]),
    ("mistral", '[TOOL_CALLS] {"name": "now", "arguments": {}}', [NOW]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now{}', [PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}', [PARIS]),
    ("pythonic", "[get_weather(city='Paris')]", [PARIS]),
    ("pythonic", ' <|python_start|>[get_weather( city = "Paris" ), now()]<|python_end|>', [PARIS, NOW]),
    ("pythonic", "now()", [NOW]),
    ("pythonic", "[now(a=1 b=2,)]", [("now", '{"a": 1, "b": 2}')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        [PARIS],
    ),
    ("qwen3_xml", "<function=now></function><function=now></tool_call>", [("now", "{}"), ("now", "{}")]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Paris</function></tool_call>", [PARIS]),
]


@pytest.mark.parametrize(("form", "text", "calls"), CALLS)
def test_calls_become_calls_and_leave_no_content(form: str, text: str, calls: list[tuple[str, str]]):
    assert parsed(form, text) == FoldedMessage(calls=calls)


@pytest.mark.parametrize(("form", "text", "calls"), [row for row in CALLS if row[0] not in ("llama3_json", "pythonic")])
def test_content_before_and_after_calls_stays(form: str, text: str, calls: list[tuple[str, str]]):
    assert parsed(form, f"\n\nLet me see. {text}") == FoldedMessage("\n\nLet me see. ", calls=calls)


def test_content_after_a_call_stays_and_white_space_beside_calls_goes():
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert parsed("hermes", f"\n{call}\n\n{call} Done. ") == FoldedMessage(" Done. ", calls=[NOW, NOW])


NO_CALLS = [
    ("hermes", "Hello <b>you</b>, <tool_call"),
    ("hermes", "  \n "),
    ("llama3_json", '{"answer": {"name": "now", "parameters": {}}}'),
    ("llama3_json", '{"name": "John", "parameters": {}}'),
    ("llama3_json", "Hello"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[other(city='Paris')]"),
    ("qwen3_coder", "<function=get_weather\n"),
    ("qwen3_coder", "<function= ></function>"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_content_to_the_last_character(form: str, text: str):
    assert parsed(form, text) == FoldedMessage(text)


REFUSED = [
    ("hermes", "<tool_call>nonsense</tool_call>", "nonsense"),
    ("hermes", "<tool_call>{'name': 'now'}</tool_call>", "{'name': 'now'}"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', '{"name": "", "arguments": {}}'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '{"arguments": {}}'),
    ("hermes", "<tool_call>{}</tool_call>", "{}"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {\'a\': 1}}', '{"name": "now", "arguments": {\'a\': 1}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '{"name": "now", "arguments": [1]}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>', '{"name": "now", "arguments": "[1]"}'),
    ("hermes", '<tool_call>{"name": "' + "x" * 300 + '"}</tool_call>', '{"name": "' + "x" * 300 + '"}'),
    ("hermes", '<tool_call>{"name": "\\ud8"}</tool_call>', '{"name": "\\ud8"}'),
    ("hermes", "So </tool_call> it is", "So  it is"),
    ("llama3_json", "<|python_tag|>print(1)", "print(1)"),
    ("mistral", "[TOOL_CALLS] []", " []"),
    ("mistral", "[TOOL_CALLS] and so on", " and so on"),
    ("mistral", "[TOOL_CALLS]now[ARGS]x", "nowx"),
    ("pythonic", "<|python_start|>Hello you", "Hello you"),
    ("qwen3_coder", "<tool_call>Hello</tool_call>", "Hello"),
]


@pytest.mark.parametrize(("form", "text", "content"), REFUSED)
def test_what_is_no_call_is_content_without_its_control_tokens(form: str, text: str, content: str):
    assert parsed(form, text) == FoldedMessage(content)


CUT = [
    ("hermes", '<tool_call> {"name": "no'),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("llama3_json", '<|python_tag|>{"name": "now"'),
    ("qwen3_coder", "<tool_call>\n<function=get_wea"),
    ("glm45", "<tool_call>get_wea"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.no"),
    ("openai", "<|start|>assistant<|channel|>comment"),
    ("openai", "<|channel|>commentary to=functions.no"),
    ("openai", "<|channel|>commentary to=fun"),
    ("phi4_mini", 'functools[{"na'),
]


@pytest.mark.parametrize(("form", "text"), CUT)
def test_a_call_that_is_cut_before_its_arguments_is_neither_a_call_nor_content(form: str, text: str):
    assert parsed(form, f"Well. {text}" if form != "llama3_json" else text).calls == []
    assert parsed(form, f"Well. {text}").content == "Well. "


BROKEN_OFF = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "", '{"a": "b"}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b", "c', "", '{"a": "b"}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, {"b": tr', "", '{"a": [1, {}]}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 12', "", '{"a": 12}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>', "x}}", "{}"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1]}', "]}", '{"a": 1}'),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, oops', ", oops", "{}"),
    ("pythonic", "[now(a=1, b=oops)]", ")]", '{"a": 1}'),
    ("pythonic", "[now(a='b", "", '{"a": "b"}'),
    ("qwen3_coder", "<function=now><parameter=a>b\nc\n", "", '{"a": "b\\nc"}'),
    ("qwen3_coder", "<function=now><parameter=a>b</parameter><parameter=c", "", '{"a": "b"}'),
    ("qwen3_coder", "<function=now><parameter=a>b\n</para", "", '{"a": "b"}'),
    ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value><arg_key>c</arg", "", '{"a": "b"}'),
    ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_va", "", '{"a": ""}'),
    ("gemma4", '<|tool_call>call:now{a:1,b:<|"|>x', "", '{"a": 1, "b": "x"}'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "arguments"), BROKEN_OFF)
def test_a_call_that_has_begun_is_completed_with_what_came_of_it(form: str, text: str, content: str, arguments: str):
    assert parsed(form, text) == FoldedMessage(content, calls=[("now", arguments)])


SLIPS = [
    ('{"a": "b\nc\td"}', {"a": "b\nc\td"}),
    ('{"a": "it\\\'s \\d"}', {"a": "it's \\d"}),
    ('{"a": "\\u00e9\\u12"}', {"a": "é\\u12"}),
    ('{"a": [1, 2,], "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}),
    ('{"a": True, "b": None, "c": False}', {"a": True, "b": None, "c": False}),
]


@pytest.mark.parametrize(("written", "value"), SLIPS)
def test_slips_in_the_json_of_arguments_are_mended(written: str, value: dict[str, Any]):
    ((_, arguments),) = parsed("hermes", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>').calls
    assert json.loads(arguments) == value


def test_arguments_are_passed_on_as_they_come():
    parser = TOOL_PARSERS["hermes"](TOOLS)
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}'
    pieces = [parser.feed(character).tool_calls for character in text]
    begins = text.index("{", 20) + 2  # where the object's first key proves that it is one
    assert [len(calls) for calls in pieces[:begins]] == [0] * (begins - 1) + [1]
    assert [calls[0].arguments for calls in pieces[begins:] if calls] == ['"city": "', *'Paris"}']


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_content_without_markers_is_never_held_back(form: str):
    parser = TOOL_PARSERS[form](TOOLS)
    assert "".join(parser.feed(word).content for word in ["Hello", " world", ", how", " are you"]) == (
        "Hello world, how are you"
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<parameter=city>\n\nO\"Neill's\\ \n\n</parameter>", {"city": "\nO\"Neill's\\ \n"}),
        ("<parameter=days>\n3\n</parameter>", {"days": 3}),
        ("<parameter=days>three</parameter>", {"days": "three"}),
        ("<parameter=exact>True</parameter>", {"exact": True}),
        ("<parameter=exact>1</parameter>", {"exact": "1"}),
        ("<parameter=days>true</parameter>", {"days": "true"}),
        ('<parameter=places>["a",\n"b"]</parameter>', {"places": ["a", "b"]}),
        ("<parameter=places>{1}</parameter>", {"places": "{1}"}),
        ("<parameter=share>None</parameter>", {"share": None}),
        ("<parameter=share>0.5<parameter=days>2</parameter>", {"share": 0.5, "days": 2}),
        ("<parameter=share>NaN</parameter>", {"share": "NaN"}),
        ("<parameter=free>3</parameter>", {"free": "3"}),
        ("<parameter=unknown>null</parameter>", {"unknown": "null"}),
        ("noise <parameter=days>2</parameter>", {}),
    ],
)
def test_bare_values_are_read_by_the_schema_of_their_parameter(written: str, value: dict[str, Any]):
    ((name, arguments),) = parsed("qwen3_coder", f"<tool_call><function=get_weather>{written}</function>").calls
    assert (name, json.loads(arguments)) == ("get_weather", value)


def test_a_bare_value_beyond_what_may_be_held_is_a_string():
    digits = "1" * (MAX_HELD_CHARS + 1)
    text = f"<function=get_weather><parameter=days>{digits}</parameter></function>"
    whole = parse(TOOL_PARSERS["qwen3_coder"](TOOLS), [text])
    assert json.loads(whole.calls[0][1]) == {"days": digits}
    assert parse(TOOL_PARSERS["qwen3_coder"](TOOLS), [text[:40_000], text[40_000:]]) == whole
    assert parse(TOOL_PARSERS["qwen3_coder"](TOOLS), [text[:-20], text[-20:]]) == whole


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it\\'s \"ok\"'", 'it\'s "ok"'),
        ('"a\\n\\t\\x41\\u00e9\\U0001F600\\d"', "a\n\tA\u00e9\U0001f600\\d"),
        ("'\\ud800'", "\ufffd"),
        ("-1.50e3", -1500.0),
        ("0x1F", 31),
        ("1_000", 1000),
        ("True", True),
        ("false", False),
        ("None", None),
        ("[1, [2.5, 'x'], (3,), []]", [1, [2.5, "x"], [3], []]),
        ("{'a': {'b': [None]}, \"c\": 1,}", {"a": {"b": [None]}, "c": 1}),
        ("[" * 32 + "]" * 32, json.loads("[" * 32 + "]" * 32)),
    ],
)
def test_python_values_become_json(written: str, value: Any):
    ((_, arguments),) = parsed("pythonic", f"[now(x={written}, y=1)]").calls
    assert json.loads(arguments) == {"x": value, "y": 1}


@pytest.mark.parametrize("written", ["f(1)", "a + b", "[1 2]", "{1: 2}", "{'a' 1}", "1e", "inf", "[" * 33, "-", "[,]"])
def test_what_is_no_python_value_ends_the_call(written: str):
    assert [name for name, _ in parsed("pythonic", f"[now(x={written}, y=1)]").calls] == ["now"]


def test_a_required_answer_is_an_array_of_calls():
    text = ' [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}] '
    found = check_output_parser(RequiredCallsParser, text)
    assert found == FoldedMessage(calls=[PARIS, NOW])
    assert check_output_parser(RequiredCallsParser, " Sorry, no.") == FoldedMessage(" Sorry, no.")


def test_the_answer_of_a_named_function_is_its_arguments():
    found = check_output_parser(lambda: NamedCallParser("get_weather"), ' {"city": "Paris"}')
    assert found == FoldedMessage(calls=[PARIS])
    assert check_output_parser(lambda: NamedCallParser("get_weather"), " \n") == FoldedMessage()


def test_each_call_has_an_id_of_its_own_in_the_models_form():
    def ids(form: str, text: str) -> list[str]:
        parser = TOOL_PARSERS[form](TOOLS)
        calls = [*parser.feed(text).tool_calls, *parser.finish().tool_calls]
        return [call.id for call in calls if call.id]

    hermes = ids("hermes", '<tool_call>{"name":"now"}</tool_call>' * 3)
    assert len(set(hermes)) == 3
    assert all(call_id.startswith("call_") for call_id in hermes)
    mistral = ids("mistral", "[TOOL_CALLS]now{}" * 3)
    assert len(set(mistral)) == 3
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in mistral)
