"""The unmodified `anthropic` client against the demo model in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def client(demo_server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def fields(demo_server: Any) -> dict[str, Any]:
    model = demo_server.client.models.list().data[0].id
    return {"model": model, "messages": STORY, "max_tokens": 24, "extra_body": {"temperature": 0}}


def test_a_message_says_what_a_chat_completion_says(client: Any, fields: dict[str, Any], demo_server: Any) -> None:
    message = client.messages.create(**fields, system="You tell stories.")
    chat = demo_server.client.chat.completions.create(
        model=fields["model"],
        messages=[{"role": "system", "content": "You tell stories."}, *STORY],
        max_tokens=24,
        temperature=0,
    )
    assert message.content[0].text == chat.choices[0].message.content
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert (message.stop_reason == "max_tokens") == (chat.choices[0].finish_reason == "length")


def test_a_stream_adds_up_to_the_whole_message(client: Any, fields: dict[str, Any]) -> None:
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_counted_tokens_are_those_that_a_message_reads(client: Any, fields: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(model=fields["model"], messages=STORY, system="Be brief.")
    usage = client.messages.create(**fields, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stop_sequence_ends_the_text_before_it_and_is_named(client: Any, fields: dict[str, Any]) -> None:
    whole = client.messages.create(**fields).content[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    message = client.messages.create(**fields, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]


def test_a_begun_answer_is_continued(client: Any, fields: dict[str, Any], demo_server: Any) -> None:
    begun = [*STORY, {"role": "assistant", "content": "Once upon a time there was a"}]
    message = client.messages.create(**fields | {"messages": begun})
    chat = demo_server.client.chat.completions.create(
        model=fields["model"],
        messages=begun,
        max_tokens=24,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert message.content[0].text == chat.choices[0].message.content


def test_refusals_arrive_as_the_clients_own_errors(client: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**fields | {"model": "other"})
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**fields | {"max_tokens": 10_000_000})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.body["request_id"] == refused.value.request_id


def test_a_form_and_a_forced_call_hold(client: Any, fields: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    fields = fields | {"max_tokens": 200}
    form = {"type": "json_schema", "schema": schema}
    message = client.messages.create(**fields, output_config={"format": form})
    jsonschema.validate(json.loads(message.content[0].text), schema)
    tool = {"name": "person", "input_schema": schema}
    message = client.messages.create(**fields, tools=[tool], tool_choice={"type": "tool", "name": "person"})
    assert [(block.type, block.name) for block in message.content] == [("tool_use", "person")]
    assert message.stop_reason == "tool_use"
    jsonschema.validate(message.content[0].input, schema)
