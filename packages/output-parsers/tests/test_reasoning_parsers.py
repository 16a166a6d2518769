"""What reasoning and answers become; every text is parsed whole and one character at a time."""

from __future__ import annotations

import pytest

from llmstack_output_parsers import REASONING_PARSERS, ChainedParser, HermesToolParser
from llmstack_output_parsers.reasoning import MAX_LINE_ENDS
from llmstack_output_parsers.testing import FoldedMessage, check_output_parser

WHOLE = "<think>\nhm, <b>\n\nwell\n</think>\n\nHi\n"


def parsed(name: str, text: str, *, is_open: bool | None) -> FoldedMessage:
    return check_output_parser(lambda: REASONING_PARSERS[name](is_open=is_open), text)


@pytest.mark.parametrize(
    ("name", "is_open", "text", "reasoning", "content"),
    [
        ("think", None, WHOLE, "hm, <b>\n\nwell", "Hi\n"),
        ("qwen3", None, WHOLE, "hm, <b>\n\nwell", "Hi\n"),
        ("think", None, "\n Hi", "", "\n Hi"),
        ("think", None, "a <think>b</think>", "", "a <think>b</think>"),
        ("think", None, "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("think", None, "<think>cut off </thi", "cut off </thi", ""),
        ("think", None, "<think>a</think>b</think>c", "a", "b</think>c"),
        ("think", True, "hm\n</think>\n\nHi", "hm", "Hi"),
        ("think", True, WHOLE, "hm, <b>\n\nwell", "Hi\n"),
        ("think", True, "</think>Hi", "", "Hi"),
        ("think", True, "hm", "hm", ""),
        ("think", False, WHOLE, "", WHOLE),
        ("deepseek_r1", None, "hm\n</think>\n\nHi", "hm", "Hi"),
        ("deepseek_r1", None, WHOLE, "hm, <b>\n\nwell", "Hi\n"),
        ("deepseek_r1", False, "Hi", "", "Hi"),
        ("mistral", None, "[THINK]hm[/THINK]Hi", "hm", "Hi"),
    ],
)
def test_reasoning_and_answer_come_apart(name: str, is_open: bool | None, text: str, reasoning: str, content: str):
    assert parsed(name, text, is_open=is_open) == FoldedMessage(content, reasoning)


def test_reasoning_is_passed_on_as_it_comes():
    parser = REASONING_PARSERS["think"](is_open=True)
    assert [parser.feed(text).reasoning for text in ("a ", "b\n", "\nc", "</", "x")] == ["a ", "b", "\n\nc", "", "</x"]


@pytest.mark.parametrize("num_lines", [MAX_LINE_ENDS, MAX_LINE_ENDS + 1])
def test_line_ends_wait_up_to_a_bound(num_lines: int):
    text = "a" + "\n" * num_lines + "</think>Hi"
    found = check_output_parser(lambda: REASONING_PARSERS["think"](is_open=True), text, [MAX_LINE_ENDS, 300])
    assert found == FoldedMessage("Hi", "a" if num_lines == MAX_LINE_ENDS else "a" + "\n" * num_lines)


def test_calls_are_looked_for_behind_the_reasoning_only():
    def make() -> ChainedParser:
        return ChainedParser(REASONING_PARSERS["think"](is_open=None), HermesToolParser())

    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = check_output_parser(make, f"<think>{call}</think>\n\n{call}\n")
    assert found == FoldedMessage(reasoning=call, calls=[("now", "{}")])
    assert check_output_parser(make, f"<think>a</think>Well. {call}").content == "Well. "
    assert check_output_parser(make, "<think>a</think>b <tool_c").content == "b <tool_c"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "Well. <|channel>thought\nhm<channel|>Hi"),
        ("mistral", "Well. [THINK]hm[/THINK]Hi"),
        ("seed_oss", "Well. <seed:think>hm</seed:think>Hi"),
        ("minimax_m3", "Well. <mm:think>hm</mm:think>Hi"),
        ("inkling", "Well. <|content_thinking|>hm<|end_message|><|content_text|>Hi<|end_message|>"),
        ("gemma4", "Well. <channel|><|channel>thought\nhm<channel|>\n\nHi"),
    ],
)
@pytest.mark.parametrize("is_open", [None, False])
def test_reasoning_between_control_tokens_may_follow_text(name: str, text: str, is_open: bool | None):
    assert parsed(name, text, is_open=is_open) == FoldedMessage("Well. Hi", "hm")
