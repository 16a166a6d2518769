"""The choice of parsers, by flags and by the chat template."""

from __future__ import annotations

import pytest

from llmstack_output_parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    DeepSeekR1Parser,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralReasoningParser,
    MistralToolParser,
    PythonicToolParser,
    Qwen3CoderToolParser,
    ThinkParser,
)
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.errors import ServeError


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        ("<tool_call>{{ x }}</tool_call>", HermesToolParser, None),
        ("<tool_call><think></think>", HermesToolParser, ThinkParser),
        ("<tool_call>\\n<function=example>", Qwen3CoderToolParser, None),
        ("[TOOL_CALLS] {{ x }}", MistralToolParser, None),
        ("[TOOL_CALLS][THINK]x[/THINK]", MistralToolParser, MistralReasoningParser),
        ("<|python_tag|>", Llama3JsonToolParser, None),
        ('Respond in the format {"name": function name, "parameters": dictionary}', Llama3JsonToolParser, None),
        ("<|python_start|>", PythonicToolParser, None),
        ("<tool_call>{{ x }}<arg_key><think></think>", TOOL_PARSERS["glm45"], ThinkParser),
        ("<seed:tool_call><seed:think>", TOOL_PARSERS["seed_oss"], REASONING_PARSERS["seed_oss"]),
        ("<minimax:tool_call><think></think>", TOOL_PARSERS["minimax_m2"], ThinkParser),
        ("<|channel|>analysis<|channel|>commentary", TOOL_PARSERS["openai"], REASONING_PARSERS["openai"]),
        ("[func_name1(params_name1=params_value1)]", PythonicToolParser, None),
    ],
)
def test_the_chat_template_tells_the_parsers(template: str | None, tool: type | None, reasoning: type | None):
    parsers = choose_parsers(ChatOptions(), template)
    assert (parsers.tool, parsers.reasoning) == (tool, reasoning)


def test_flags_win_over_the_template():
    options = ChatOptions(tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    parsers = choose_parsers(options, "<tool_call></think>")
    assert (parsers.tool, parsers.reasoning) == (MistralToolParser, DeepSeekR1Parser)
    assert dict(parsers.facts) == {
        "tool_call_parser": "mistral (by flag)",
        "reasoning_parser": "deepseek_r1 (by flag)",
    }
    off = choose_parsers(ChatOptions(tool_call_parser="none", reasoning_parser="none"), "<tool_call></think>")
    assert (off.tool, off.reasoning) == (None, None)


def test_a_server_that_must_have_a_parser_does_not_start_without():
    assert choose_parsers(ChatOptions(needs_tool_parser=True), "<tool_call>").tool is HermesToolParser
    with pytest.raises(ServeError, match=r"--enable-auto-tool-choice: .* name one by --tool-call-parser"):
        choose_parsers(ChatOptions(needs_tool_parser=True), "{{ x }}")


def response_template(**calls: object) -> dict[str, object]:
    thinking = {"open": "<reason>", "close": "</reason>"}
    return {"start_anchor": "<|assistant|>", "fields": {"thinking": thinking, "content": {}, "tool_calls": calls}}


OBJECTS = {"content": "json", "transform": {"type": "function", "function": "{content}"}}


def test_a_response_template_is_followed_where_no_parser_of_ours_reads_its_form():
    own = choose_parsers(ChatOptions(), "</think>", response_template(open="<act>", close="</act>", **OBJECTS))
    assert own.tool is not None
    assert own.reasoning is not None
    assert (own.tool.kept_tokens, own.reasoning.start) == (("<act>", "</act>"), "<reason>")
    assert set(dict(own.facts).values()) == {"as the checkpoint's response template says"}
    same = choose_parsers(ChatOptions(), "<tool_call>", response_template(open="<tool_call>", **OBJECTS))
    assert same.tool is HermesToolParser
    lines = response_template(open="<tool_call>", content="kv-lines", transform=OBJECTS["transform"])
    assert choose_parsers(ChatOptions(), "<tool_call>", lines).tool is not HermesToolParser


def test_flags_win_over_a_response_template():
    options = ChatOptions(tool_call_parser="mistral", reasoning_parser="none")
    parsers = choose_parsers(options, None, response_template(open="<act>", **OBJECTS))
    assert (parsers.tool, parsers.reasoning) == (MistralToolParser, None)


def test_a_response_template_that_is_not_read_is_named(caplog: pytest.LogCaptureFixture):
    parsers = choose_parsers(ChatOptions(), "<tool_call>", response_template(open="<tool_call>", content="yaml"))
    assert parsers.tool is HermesToolParser
    assert "the response template of the checkpoint is not read" in caplog.text
    assert "'yaml'" in caplog.text
