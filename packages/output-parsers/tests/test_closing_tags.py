"""Values that hold the tags of their format: a tag closes only where the format can go on after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers import TOOL_PARSERS
from llmstack_output_parsers.example_calls import EXAMPLE_CALLS, SCHEMA, TOOLS
from llmstack_output_parsers.testing import check_output_parser

OTHER_CLOSERS = [
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "</invoke>", "```", "]", ")]", "}}", "'",
]  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "string": SCHEMA,
    "string or null": {"properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
    "untyped": {},
}


def closers_of(form: str) -> Iterator[str]:
    """The texts that close something in a format."""
    make: Any = TOOL_PARSERS[form]
    yield from (token for token in make.kept_tokens if token != "<arg_value>")  # at the start it is one of two
    for name in ("function_end", "parameter_end", "call_end", "quote"):
        yield from [getattr(make, name)] if hasattr(make, name) else []
    yield from getattr(make, "closings", ())
    if form == "minimax_m3":
        yield "]<]minimax[>[</city>"


def check_value(form: str, city: str, schema: Any) -> None:
    tools = {**TOOLS, "get_weather": schema}
    found = check_output_parser(lambda: TOOL_PARSERS[form](tools), EXAMPLE_CALLS[form](city), range(0, 400, 7))
    ((name, arguments),) = found.calls
    assert (name, json.loads(arguments)["city"], found.content.strip()) == ("get_weather", city, "")


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_there_is_an_example_of_every_format(form: str):
    found = check_output_parser(lambda: TOOL_PARSERS[form](TOOLS), f"{EXAMPLE_CALLS[form]('Rome')}\n")
    ((name, arguments),) = found.calls
    days = "3" if form == "mimo" else 3  # its values are strings
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Rome", "days": days})


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_a_value_may_hold_every_closing_tag(form: str):
    for schema in SCHEMAS.values():
        for closer in {*closers_of(form), *OTHER_CLOSERS}:
            for city in (f"a {closer} b", f"{closer} b", f"a{closer}{closer} b", f"a\n{closer}\nb"):
                check_value(form, city, schema)


@given(data=st.data(), form=st.sampled_from(sorted(TOOL_PARSERS)), schema=st.sampled_from(list(SCHEMAS.values())))
@settings(max_examples=200, deadline=None)
def test_a_value_may_hold_any_closing_tags_amid_words(data: st.DataObject, form: str, schema: Any):
    closers = [*closers_of(form), *OTHER_CLOSERS]
    pairs = st.tuples(st.sampled_from(closers), st.sampled_from(["b", "é ", "\nc", " d\n", "1"]))
    city = "a" + "".join(data.draw(st.lists(pairs.map(" ".join), max_size=4))) + "z"
    check_value(form, city, schema)


SLIPS = [
    ("qwen3_coder", "<function=get_weather><parameter=city>Rome</parameter/></function>"),
    ("qwen3_coder", "<function=get_weather><parameter=city>\nRome\n</parameter/>\n<parameter=days>3</parameter/>"),
    ("qwen3_coder", "<function=get_weather><parameter=city>Rome</function>"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Rome</tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key>Rome</arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\nRome</arg_value>\n</tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city<arg_value>Rome</arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key><arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key></arg_key><arg_value>Rome</arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value><arg_value>Rome</arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></arg_value></tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</tool_call>"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key><arg_value>3"),
    ("hy_v3", "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key>Rome</arg_value></tool_call>"),
    ("dots", '<dots_function_call><invoke name="get_weather"><parameter name="city">Rome</invoke>'),
    ("minimax_m2", '<invoke name="get_weather"><parameter name="city">Rome</invoke>'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), SLIPS)
def test_a_tag_that_a_model_omits_or_writes_twice_costs_no_value(form: str, text: str):
    found = check_output_parser(lambda: TOOL_PARSERS[form](TOOLS), text, range(0, 200, 7))
    ((name, arguments),) = found.calls
    assert (name, json.loads(arguments)["city"], found.content.strip()) == ("get_weather", "Rome", "")


def test_two_tags_far_apart_are_a_value_to_the_end():
    text = f"<function=get_weather><parameter=city>a</parameter>{' ' * 300}</function>"
    found = check_output_parser(lambda: TOOL_PARSERS["qwen3_coder"](TOOLS), text, range(0, 400, 7))
    assert json.loads(found.calls[0][1])["city"].startswith("a</parameter> ")
