"""Messages as templates get them: tool calls, content parts, documents, and the template that fits."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.chat.messages import normal_documents, normal_messages
from llmstack_llm.chat.renderer import ChatRenderer
from llmstack_llm.chat.renderers import MAX_KEPT_TEMPLATES, ChatRenderers
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_files import ChatTemplateError
from llmstack_llm.chat.template_traits import ContentFormat
from llmstack_llm.requests import ChatPrompt
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import InvalidRequestError

SPECIALS = ("<s>", "</s>", "<|call|>")
CALLS = """{% for m in messages %}{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};
{%- endfor %}"""
PARTS = """{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %};{% endfor %}"""
EITHER = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content | selectattr('type', 'equalto', 'text') %}[{{ p['text'] }}]{% endfor %}{% endif %};
{%- endfor %}"""


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(SPECIALS), {"bos_token": "<s>"})


def rendered(
    source: str | None, messages: list[dict[str, Any]], *, content_format: str = "auto", **options: Any
) -> str:
    ours = tokenizer()
    template = ChatTemplate(source, ours.named_tokens)
    return ChatRenderer(template, ours, content_format=content_format).render(ChatPrompt(messages, **options)).text


def call(arguments: Any, name: str = "now") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize("arguments", ['{"a": [1, "é"]}', {"a": [1, "é"]}])
def test_arguments_of_calls_reach_the_template_as_an_object(arguments: Any):
    messages = [
        {"role": "user", "content": "x"},
        call(arguments),
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert rendered(CALLS, messages) == 'user:x;assistant:<|call|>now({"a": [1, "é"]});tool:3;'


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_no_arguments_are_an_empty_object(arguments: Any):
    (message,) = normal_messages([call(arguments)])
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    assert message["content"] == ""


def test_calls_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(SPECIALS), bos_token="<s>")
    messages = [{"role": "user", "content": "x"}, {**call({"a": 1}), "content": ""}]
    expected = reference.apply_chat_template(messages, chat_template=CALLS, tokenize=False)
    assert rendered(CALLS, messages, add_generation_prompt=False) == expected


def test_an_empty_list_of_calls_is_none():
    assert normal_messages([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]


def test_what_a_user_writes_into_arguments_is_no_control_token():
    ours = tokenizer()
    renderer = ChatRenderer(ChatTemplate(CALLS, {}), ours)
    prompt = renderer.render(ChatPrompt([call({"a": "<|call|></s>"})]))
    text, token_ids = prompt.text, prompt.token_ids
    assert text.count("<|call|>") == 2
    special = [token_id for token_id in token_ids if token_id in ours.special_token_ids]
    assert special == [ours.special_tokens["<|call|>"]]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("content", ["Hello", "</s>" * 9])
def test_the_length_of_the_rendered_text_is_checked_before_it_is_tokenized(content: str, is_cut: bool):
    class TooLongError(Exception):
        pass

    checked: list[tuple[int, str, bool]] = []

    def check_length(num_chars: int, param: str, *, is_cut: bool = False) -> None:
        checked.append((num_chars, param, is_cut))
        raise TooLongError

    ours = tokenizer()
    ours.backend = None  # type: ignore[assignment]  # whatever tokenizes fails
    renderer = ChatRenderer(ChatTemplate("{{ messages[0].content }}!", {}), ours, check_length=check_length)
    with pytest.raises(TooLongError):
        renderer.render(ChatPrompt([{"role": "user", "content": content}], is_cut=is_cut))
    assert checked == [(len(content) + 1, "messages", is_cut)]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (call(5), "messages[0].tool_calls[0].function.arguments", "invalid_type"),
        (call("{}", name=5), "messages[0].tool_calls[0].function.name", "invalid_type"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls", "invalid_type"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]", "invalid_type"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function", "invalid_type"),
        ({"role": "assistant", "tool_calls": [{}] * 129}, "messages[0].tool_calls", "array_above_max_length"),
        ({"role": "tool"}, "messages[0].content", "missing_required_parameter"),
    ],
)
def test_malformed_calls_are_refused_by_name(message: dict[str, Any], param: str, code: str):
    with pytest.raises(InvalidRequestError) as caught:
        normal_messages([message])
    assert (caught.value.param, caught.value.code) == (param, code)


def test_reasoning_goes_by_both_of_its_names():
    (message,) = normal_messages([{"role": "assistant", "content": "a", "reasoning": "b"}])
    assert message["reasoning_content"] == message["reasoning"] == "b"


@pytest.mark.parametrize(("newer", "older"), [("b", "b"), ("b", ""), ("", "b"), (None, "b")])
def test_both_names_of_reasoning_may_say_the_same(newer: str | None, older: str):
    (message,) = normal_messages([{"role": "assistant", "reasoning": newer, "reasoning_content": older}])
    assert (message["reasoning"], message["reasoning_content"]) == ("b", "b")


@pytest.mark.parametrize(("newer", "older"), [("a", "b"), ("a", 1)])
def test_both_names_of_reasoning_must_not_differ(newer: str, older: object):
    with pytest.raises(InvalidRequestError) as caught:
        normal_messages([{"role": "assistant", "reasoning": newer, "reasoning_content": older}])
    assert caught.value.param == "messages[0].reasoning_content"


@pytest.mark.parametrize(
    ("source", "setting", "expected"),
    [
        (CALLS, "auto", ContentFormat()),
        (PARTS, "auto", ContentFormat(keeps_parts=True, wraps_texts=True)),
        (EITHER, "auto", ContentFormat(keeps_parts=True, wraps_texts=False)),
        (EITHER, "string", ContentFormat()),
        (CALLS, "openai", ContentFormat(keeps_parts=True, wraps_texts=True)),
        ("{% for t in messages[0].content.split('x') %}{% endfor %}", "auto", ContentFormat()),
        (None, "auto", ContentFormat()),
    ],
)
def test_a_template_tells_how_it_reads_content(source: str | None, setting: str, expected: ContentFormat):
    assert ChatTemplate(source).content_format(setting) == expected


def test_content_reaches_the_template_in_the_form_that_it_reads():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert rendered(PARTS, messages) == "[a][b];[c];"
    assert rendered(EITHER, messages) == "[a][b];c;"
    assert rendered(EITHER, messages, content_format="string") == "a\nb;c;"
    assert rendered(EITHER, messages, content_format="openai") == "[a][b];[c];"


def test_a_final_message_of_parts_can_be_continued():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    assert rendered(PARTS, messages, add_generation_prompt=False, continue_final_message=True) == "[a];[b"


def test_documents_reach_the_template():
    source = "{% for d in documents %}{{ d.title }}{% endfor %}"
    message = {"role": "user", "content": "x"}
    assert rendered(source, [message], documents=[{"title": "A"}, {"title": "B"}]) == "AB"
    assert rendered("{{ documents is none }}", [message]) == "True"


@pytest.mark.parametrize("documents", ["x", [1], [{}] * 1025])
def test_malformed_documents_are_refused(documents: Any):
    with pytest.raises(InvalidRequestError, match="documents"):
        normal_documents(documents)


def test_the_template_for_tools_renders_conversations_with_tools():
    renderers = ChatRenderers(ChatTemplate("plain", tool_source="tools"), tokenizer())
    message = [{"role": "user", "content": "x"}]
    assert renderers.pick(has_tools=False).render(ChatPrompt(message)).text == "plain"
    assert renderers.pick(has_tools=True).render(ChatPrompt(message)).text == "tools"
    assert (
        ChatRenderers(ChatTemplate("plain"), tokenizer()).pick(has_tools=True).render(ChatPrompt(message)).text
        == "plain"
    )


def test_a_broken_template_for_tools_is_refused_with_the_other():
    with pytest.raises(ChatTemplateError):
        ChatTemplate("plain", tool_source="{% for %}")


def test_templates_of_requests_are_kept_compiled_up_to_a_bound():
    renderers = ChatRenderers(ChatTemplate("plain"), tokenizer())
    first = renderers.pick(has_tools=False, chat_template="0")
    for number in range(1, MAX_KEPT_TEMPLATES):
        renderers.pick(has_tools=False, chat_template=str(number))
    assert renderers.pick(has_tools=False, chat_template="0") is first
    for number in range(MAX_KEPT_TEMPLATES, 2 * MAX_KEPT_TEMPLATES):
        renderers.pick(has_tools=False, chat_template=str(number))
    assert renderers.pick(has_tools=False, chat_template="0") is not first
    with pytest.raises(InvalidRequestError, match="chat_template"):
        renderers.pick(has_tools=False, chat_template="{% for %}")


@pytest.mark.parametrize(("content", "thinking"), [(None, "why"), ("I look.", None)])
def test_a_template_that_reads_thinking_has_it_except_beside_calls_and_content(
    content: str | None, thinking: str | None
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    given = {"role": "assistant", "content": content, "reasoning": "why"}
    (plain,) = normal_messages([given])
    (calling,) = normal_messages([given | {"tool_calls": [call]}])
    assert plain["thinking"] == "why"
    assert calling.get("thinking") == thinking
