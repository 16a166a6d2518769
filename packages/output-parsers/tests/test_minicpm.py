"""Tool calls of MiniCPM 5: values as XML has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmstack_output_parsers.minicpm import MiniCPM5ToolParser
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import check_output_parser, parse

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "date": {"type": "string"}}},
    "sum_values": {"type": "object", "properties": {"nums": {"type": "array"}, "exact": {"type": "boolean"}}},
    "noop": {"type": "object", "properties": {"note": {"type": "string"}}},
}


def calls_of(text: str) -> list[tuple[str, Any]]:
    found = check_output_parser(lambda: MiniCPM5ToolParser(TOOLS), text, range(0, 200, 7))
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


# As vLLM's tests of the format have them.
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            'Head\n<function name="get_weather"><param name="city">上海</param><param name="date">5</param></function>',
            [("get_weather", {"city": "上海", "date": "5"})],
        ),
        (
            '<function name="get_weather"><param name="city"><![CDATA[北\n京 </b> &lt;]]></param></function>\n',
            [("get_weather", {"city": "北\n京 </b> &lt;"})],
        ),
        (
            '<function name="sum_values"><param name="nums">[1, 2]</param><param name="exact">true</param></function>',
            [("sum_values", {"nums": [1, 2], "exact": True})],
        ),
        ('<function name="noop"></function>\n', [("noop", {})]),
        (
            '<function name="noop"><param name="note">a &lt;b&gt; &amp;amp; &quot;c&apos;</param></function>',
            [("noop", {"note": "a <b> &amp; \"c'"})],
        ),
        (
            '<function name="noop"></function>\n<function name="noop"><param name="note">\nx\n</param></function>',
            [("noop", {}), ("noop", {"note": "x"})],
        ),
    ],
)
def test_calls_have_the_values_that_are_meant(text: str, calls: list[tuple[str, Any]]):
    assert calls_of(text) == calls


def test_a_long_value_is_passed_on_as_it_is():
    long = "x&lt;" * MAX_HELD_CHARS
    found = parse(MiniCPM5ToolParser(TOOLS), [f'<function name="noop"><param name="note">{long}</param></function>'])
    assert json.loads(found.calls[0][1]) == {"note": long}
