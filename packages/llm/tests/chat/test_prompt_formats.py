"""Templates of formats whose repositories have none give the texts that were published with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmstack_llm.chat.renderer import ChatRenderer
from llmstack_llm.chat.renderers import load_chat_template
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_files import ChatTemplateError, find_chat_template
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.requests import ChatPrompt
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.prompt_formats import PROMPT_FORMATS, format_text, with_known_tokens
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_model_files import SPEECH_ARCHITECTURE
from llmstack_types import InvalidRequestError

SPECIALS = ["<s>", "</s>", "<｜User｜>", "<｜Assistant｜>", "<|turn>", "<turn|>", "<|message_user|>", "<|end_message|>"]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def call(name: str, call_id: str = "a", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


WEATHER = function(
    "get_weather",
    description="Get the weather for a specific location",
    parameters={
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city name"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Temperature unit"},
        },
        "required": ["location"],
    },
)
WEATHER_JSON = (
    '{"name": "get_weather", "description": "Get the weather for a specific location", "parameters": {"type": "object",'
    ' "properties": {"location": {"type": "string", "description": "The city name"}, "unit": {"type": "string", "enum":'
    ' ["celsius", "fahrenheit"], "description": "Temperature unit"}}, "required": ["location"]}}'
)


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = Tokenizer(byte_tokenizer(SPECIALS), {"bos_token": "<s>", "eos_token": "</s>"})
    template = ChatTemplate(format_text(name), tokenizer.named_tokens)
    return ChatRenderer(template, tokenizer).render(ChatPrompt(messages, **options)).text


# Published with DeepSeek V4: `encoding/tests/test_output_1.txt`, here with one of its two tools.
V4_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{WEATHER_JSON}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501
V4_CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What's the weather in Beijing?"},
    {"role": "assistant", "content": "", "reasoning": "I should use the get_weather tool.",
     "tool_calls": [call("get_weather", location="Beijing", unit="celsius", days=2)]},
    {"role": "tool", "tool_call_id": "a", "content": '{"temperature": 22}'},
    {"role": "assistant", "content": "It is sunny.", "reasoning": "Got the weather data."},
]  # fmt: skip
V4_CALLS = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="location" string="true">Beijing</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true">celsius</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def test_deepseek_v4_with_a_tool_is_the_published_text():
    text = rendered("deepseek_v4", V4_CHAT, tools=[WEATHER], add_generation_prompt=False)
    assert text == (
        f"{BOS}You are a helpful assistant.\n\n{V4_TOOLS}<｜User｜>What's the weather in Beijing?<｜Assistant｜><think>"
        f"I should use the get_weather tool.</think>{V4_CALLS}{EOS}"
        '<｜User｜><tool_result>{"temperature": 22}</tool_result><｜Assistant｜><think>Got the weather data.</think>'
        f"It is sunny.{EOS}"
    )


HELLO = [{"role": "user", "content": "Hello"}]
OLDER = [
    {"role": "user", "content": "Q1"}, {"role": "assistant", "reasoning": "because", "content": "A1"},
    {"role": "user", "content": "Q2"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, f"{BOS}<｜User｜>Hello<｜Assistant｜><think>"),
        ({"thinking": False}, f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"),
        ({"reasoning_effort": "high"}, f"{BOS}<｜User｜>Hello<｜Assistant｜><think>"),
    ],
)
def test_deepseek_v4_thinks_unless_that_is_turned_off(kwargs: dict[str, Any], expected: str):
    assert rendered("deepseek_v4", HELLO, template_kwargs=kwargs) == expected


def test_deepseek_v4_says_the_greatest_effort_first():
    text = rendered("deepseek_v4", HELLO, template_kwargs={"reasoning_effort": "max"})
    assert text.startswith(f"{BOS}Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST")
    assert text.endswith("is left unchecked.\n\n<｜User｜>Hello<｜Assistant｜><think>")


def test_deepseek_v4_leaves_out_older_reasoning_and_keeps_it_beside_tools():
    expected = f"{BOS}<｜User｜>Q1<｜Assistant｜></think>A1{EOS}<｜User｜>Q2<｜Assistant｜><think>"
    assert rendered("deepseek_v4", OLDER) == expected
    beside = rendered("deepseek_v4", OLDER, tools=[WEATHER])
    assert beside == (
        f"{BOS}\n\n{V4_TOOLS}<｜User｜>Q1<｜Assistant｜><think>because</think>A1{EOS}<｜User｜>Q2<｜Assistant｜><think>"
    )


def test_deepseek_v4_puts_results_into_the_order_of_calls():
    chat = [
        *HELLO, {"role": "assistant", "content": "", "tool_calls": [call("f", "1"), call("g", "2")]},
        {"role": "tool", "tool_call_id": "2", "content": "G"}, {"role": "tool", "tool_call_id": "1", "content": "F"},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    text = rendered("deepseek_v4", chat)
    turn = "<｜User｜><tool_result>F</tool_result>\n\n<tool_result>G</tool_result>\n\nSo?<｜Assistant｜><think>"
    assert text.endswith(turn)


# As `encoding/encoding_dsv32.py` of DeepSeek V3.2 writes it.
V32_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{WEATHER_JSON}
</functions>
"""  # noqa: E501
V32_CALLS = V4_CALLS.replace("tool_calls>", "function_calls>")


@pytest.mark.parametrize("thinks", [True, False])
def test_deepseek_v32_with_a_tool_is_the_published_text(thinks: bool):
    tag = "<think>" if thinks else "</think>"
    first, second = (f"{text}</think>" if thinks else "" for text in (V4_CHAT[2]["reasoning"], V4_CHAT[4]["reasoning"]))
    options = {"tools": [WEATHER], "add_generation_prompt": False, "template_kwargs": {"thinking": thinks}}
    assert rendered("deepseek_v32", V4_CHAT, **options) == (
        f"{BOS}You are a helpful assistant.\n\n{V32_TOOLS}<｜User｜>What's the weather in Beijing?<｜Assistant｜>{tag}"
        f'{first}{V32_CALLS}{EOS}\n\n<function_results>\n<result>{{"temperature": 22}}</result>\n</function_results>'
        f"\n\n{tag}{second}It is sunny.{EOS}"
    )


def test_deepseek_v32_has_tools_in_front_of_a_conversation_without_a_system_message():
    text = rendered("deepseek_v32", OLDER, tools=[WEATHER], template_kwargs={"enable_thinking": True})
    assert text == (f"{BOS}\n\n{V32_TOOLS}<｜User｜>Q1<｜Assistant｜></think>A1{EOS}<｜User｜>Q2<｜Assistant｜><think>")


def test_a_result_without_a_call_is_refused():
    with pytest.raises(InvalidRequestError, match="a result of a tool follows no call"):
        rendered("deepseek_v32", [*HELLO, {"role": "tool", "tool_call_id": "a", "content": "x"}])


EFFORT = "<|message_system|><|content_text|>Thinking effort level: {}<|end_message|>"


def test_inkling_with_tools_is_the_published_text():
    chat = [
        *HELLO,
        {"role": "assistant", "reasoning": "think", "content": "answer", "tool_calls": [call("f", z=1, a={"b": "ö"})]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    tools = [function("f", parameters={"z": 1, "a": {"b": 2}})]
    assert rendered("inkling", chat, tools=tools) == (
        '<|message_system|>tool_declare<|content_xml|>[{"description":"","name":"f",'
        '"parameters":{"a":{"b":2},"z":1},"type":"function"}]<|end_message|>' + EFFORT.format(0.9) +
        "<|message_user|><|content_text|>Hello<|end_message|>"
        "<|message_model|><|content_thinking|>think<|end_message|>"
        "<|message_model|><|content_text|>answer<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":{"b":"ö"},"z":1}}<|end_message|>'
        "<|content_model_end_sampling|><|message_tool|>f<|content_text|>sunny<|end_message|><|message_model|>"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "0.0"), (0, "0.0"), ("medium", "0.7"), (0.25, "0.25"), ("max", "0.99")]
)
def test_inkling_says_the_effort_once_behind_the_first_system_messages(effort: object, shown: str):
    chat = [{"role": "system", "content": "rules"}, *HELLO]
    text = rendered("inkling", chat, template_kwargs={"reasoning_effort": effort})
    system = "<|message_system|><|content_text|>rules<|end_message|>"
    assert text == (
        f"{system}{EFFORT.format(shown)}<|message_user|><|content_text|>Hello<|end_message|><|message_model|>"
    )


@pytest.mark.parametrize("effort", ["enormous", 1.5, -0.1, True])
def test_inkling_refuses_another_effort(effort: object):
    with pytest.raises(InvalidRequestError, match="reasoning_effort is none of"):
        rendered("inkling", HELLO, template_kwargs={"reasoning_effort": effort})


def test_a_token_without_its_name_is_written_as_the_tokenizer_knows_it():
    source = format_text("inkling")
    assert "<|unused_200024|>" in with_known_tokens(source, {"<|unused_200024|>"})
    assert with_known_tokens(source, {"<|unused_200024|>", "<|content_xml|>"}) == source


def test_chats_with_tools_have_the_known_name_too():
    tokenizer = Tokenizer(byte_tokenizer([*SPECIALS, "<|unused_200024|>"]), {})
    template = load_chat_template(cast("ModelConfig", SimpleNamespace(tokenizer_path=None)), tokenizer, "inkling")
    assert template.tool_template is None  # the same
    text = ChatRenderer(template, tokenizer).render(ChatPrompt(HELLO, tools=[WEATHER])).text
    assert "tool_declare<|unused_200024|>[" in text


@pytest.mark.parametrize(("architecture", "is_said"), [("GPT2LMHeadModel", True), (SPEECH_ARCHITECTURE, False)])
def test_a_model_that_could_chat_is_said_to_have_no_template(
    architecture: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = cast("ModelConfig", SimpleNamespace(tokenizer_path=tmp_path, architecture=architecture))
    load_chat_template(config, Tokenizer(byte_tokenizer(SPECIALS), {}), None)
    assert ("no chat template" in caplog.text) is is_said


def test_gemma_4_with_tools_and_thoughts():
    chat = [
        {"role": "system", "content": " Be brief. "}, *HELLO,
        {"role": "assistant", "reasoning": "hm", "content": "", "tool_calls": [
            call("get_weather", location="Oslo", days=[1, True], deep={"x": None})]},
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
    ]  # fmt: skip
    assert rendered("tool_chat_template_gemma4", chat, tools=[WEATHER], template_kwargs={"enable_thinking": True}) == (
        "<s><|turn>system\n<|think|>\nBe brief.<|tool>declaration:get_weather{"
        'description:<|"|>Get the weather for a specific location<|"|>,parameters:{properties:{'
        'location:{description:<|"|>The city name<|"|>,type:<|"|>STRING<|"|>},'
        'unit:{description:<|"|>Temperature unit<|"|>,enum:[<|"|>celsius<|"|>,<|"|>fahrenheit<|"|>],'
        'type:<|"|>STRING<|"|>}},required:[<|"|>location<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
        "<|turn>user\nHello<turn|>\n<|turn>model\n<|channel>thought\nhm\n<channel|>"
        '<|tool_call>call:get_weather{days:[1,true],deep:{x:None},location:<|"|>Oslo<|"|>}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>cold<|"|>}<tool_response|>'
    )


def test_gemma_4_declares_nested_types():
    parameters = {
        "type": "object",
        "properties": {
            "rows": {"type": "array", "items": {"type": "object", "required": ["n"],
                                                "properties": {"n": {"type": "integer"}}}},
            "where": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                      "nullable": True},
        },
    }  # fmt: skip
    text = rendered("tool_chat_template_gemma4", HELLO, tools=[function("f", description="d", parameters=parameters)])
    declared = text.partition("parameters:")[2].partition("<tool|>")[0]
    assert declared == (
        '{properties:{rows:{items:{properties:{n:{type:<|"|>INTEGER<|"|>}},required:[<|"|>n<|"|>],'
        'type:<|"|>OBJECT<|"|>},type:<|"|>ARRAY<|"|>},where:{nullable:true,properties:{city:{type:<|"|>STRING<|"|>}},'
        'required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}},type:<|"|>OBJECT<|"|>}}'
    )
    assert text.endswith("<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\n<|channel>thought\n<channel|>")


def test_a_path_that_is_no_file_names_one_of_these_templates(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    found = find_chat_template(None, {}, override="examples/tool_chat_template_gemma4.jinja")
    assert found == format_text("tool_chat_template_gemma4")
    assert "llmstack's own template of that name is used" in caplog.text
    assert [find_chat_template(None, {}, override=name) for name in PROMPT_FORMATS] == [
        *map(format_text, PROMPT_FORMATS)
    ]
    with pytest.raises(ChatTemplateError, match="no such file"):
        find_chat_template(None, {}, override="examples/tool_chat_template_other.jinja")
