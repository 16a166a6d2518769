"""What is longer than a parser may hold back falls to the content, however it is cut."""

from __future__ import annotations

from llmstack_output_parsers import HermesToolParser, Llama3JsonToolParser
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import FoldedMessage, check_output_parser

CALL = '<tool_call>{"name": "now"}</tool_call>'
TAG = "<tool_call>"
PLACES = [1, 12, 40, 1000, MAX_HELD_CHARS - 1, MAX_HELD_CHARS, MAX_HELD_CHARS + 40]


def test_white_space_before_a_call():
    at_most = " " * MAX_HELD_CHARS
    assert check_output_parser(HermesToolParser, at_most + CALL, PLACES) == FoldedMessage(calls=[("now", "{}")])
    found = check_output_parser(HermesToolParser, at_most + " " + CALL, PLACES)
    assert found == FoldedMessage(at_most + " ", calls=[("now", "{}")])


def test_white_space_in_a_call():
    text = "<tool_call>" + " " * (MAX_HELD_CHARS + 5) + '{"name": "now"}'
    assert check_output_parser(HermesToolParser, text, PLACES) == FoldedMessage(text.removeprefix(TAG))


def test_arguments_before_the_name():
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD_CHARS + '"}, "name": "now"}'
    assert check_output_parser(HermesToolParser, text, PLACES) == FoldedMessage(text.removeprefix(TAG))


def test_other_members_of_a_call():
    text = "{" + '"type": "x", ' * (MAX_HELD_CHARS // 10) + '"name": "now", "parameters": {}}'
    assert check_output_parser(lambda: Llama3JsonToolParser({"now": {}}), text, PLACES) == FoldedMessage(text)


def test_arguments_after_the_name_have_no_bound():
    arguments = '{"a": "' + "x" * (2 * MAX_HELD_CHARS) + '"}'
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert check_output_parser(HermesToolParser, text, PLACES) == FoldedMessage(calls=[("now", arguments)])
