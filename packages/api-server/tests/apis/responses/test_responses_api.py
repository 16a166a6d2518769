"""`/v1/responses` over the fake engine: through the official client, and what it does not show."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_helpers.responses import create, named_events

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import AnswerConfig
from llmstack_server.testing import FakeEngineClient, ready_state


def new_app() -> Any:
    return build_app(ready_state(FakeEngineClient(), names=("fake", "alias")))


# Applications that several tests or examples share: building one takes a while. Those that generate belong to one loop.
any_app = pytest.fixture(scope="module")(new_app)
generating_app = pytest.fixture(scope="module")(new_app)


async def test_the_client_gets_a_text_and_what_it_asked_for(client: openai.AsyncOpenAI):
    response = await client.responses.create(
        model="fake", input="Hello", instructions="Hi", max_output_tokens=8, temperature=0.5, metadata={"a": "b"}
    )
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "incomplete", "fake")
    assert response.output_text == "Hi\nHello"
    assert (response.instructions, response.temperature, response.metadata) == ("Hi", 0.5, {"a": "b"})
    assert response.incomplete_details is not None
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (8, 8, 16)


async def test_the_client_streams_what_the_whole_answer_says(client: openai.AsyncOpenAI):
    fields: dict[str, Any] = {"model": "fake", "input": "Hello", "max_output_tokens": 9}
    whole = await client.responses.create(**fields)
    async with client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


@given(st.text("ab c", min_size=1, max_size=12), st.integers(1, 20), st.none() | st.integers(0, 3))
async def test_any_response_says_the_same_streamed_and_whole(
    generating_app: Any, text: str, max_output_tokens: int, top_logprobs: int | None
):
    fields = {"input": text, "max_output_tokens": max_output_tokens, "top_logprobs": top_logprobs, "store": False}
    whole = (await create(generating_app, **fields)).json()
    assert "user" not in whole  # the schema has no null here
    streamed = json.loads((await create(generating_app, **fields, stream=True)).body.decode().split("data: ")[-1])[
        "response"
    ]
    for response in (whole, streamed):
        for item in (response, *response["output"]):
            del item["id"]
        del response["created_at"]
    assert streamed == whole


async def test_logprobs_come_with_the_text(client: openai.AsyncOpenAI):
    fields: dict[str, Any] = {"model": "fake", "input": "Hello", "max_output_tokens": 3}
    for extra in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = await client.responses.create(**fields, **extra)
        part = response.output[0].content[0]
        assert [entry.token for entry in part.logprobs] == list("Hel")
        assert {len(entry.top_logprobs) for entry in part.logprobs} == {extra.get("top_logprobs", 0)}
    stream = await client.responses.create(**fields, top_logprobs=1, stream=True)
    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == list("Hel")


async def test_tokens_show_as_ids_where_the_server_says_so():
    http = HTTPConfig(answers=AnswerConfig(shows_tokens_as_ids=True))
    answer = (await create(build_app(ready_state(FakeEngineClient(), http)), top_logprobs=1)).json()
    assert answer["output"][0]["content"][0]["logprobs"][0]["token"] == "token_id:72"


async def test_a_conversation_goes_on_from_the_response_before(client: openai.AsyncOpenAI, engine: FakeEngineClient):
    first = await client.responses.create(model="fake", input="One", max_output_tokens=3, instructions="Not again")
    second = await client.responses.create(
        model="fake", input="Two", max_output_tokens=3, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    assert engine.admitted[-1].prompt == "One\nNot\nTwo"
    third = await client.responses.create(
        model="fake",
        input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "Three"}],
        max_output_tokens=3,
    )
    assert engine.admitted[-1].prompt == "One\nThree"
    assert third.output_text == "One"


async def test_the_client_retrieves_lists_and_deletes(client: openai.AsyncOpenAI):
    first = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    second = await client.responses.create(
        model="fake", input=[{"role": "user", "content": t} for t in "ab"], previous_response_id=first.id
    )
    assert await client.responses.retrieve(second.id) == second
    page = await client.responses.input_items.list(second.id, limit=3)
    assert page.has_more
    assert [item.content[0].text async for item in page] == ["b", "a", "One", "One"]
    ascending = await client.responses.input_items.list(second.id, order="asc", after=page.data[1].id)
    assert [item.content[0].text for item in ascending.data] == ["b"]
    await client.responses.delete(second.id)
    for attempt in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await attempt(second.id)
        assert caught.value.code == "not_found"
    assert await client.responses.retrieve(first.id) == first


async def test_input_tokens_are_counted_as_they_are_read(client: openai.AsyncOpenAI):
    first = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    fields: dict[str, Any] = {"model": "fake", "input": "Two", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**fields, instructions="Be brief.")
    response = await client.responses.create(**fields, instructions="Be brief.", max_output_tokens=3)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens == len("Be brief.\nOne\nOne\nTwo")


async def test_what_is_not_to_be_stored_is_not(client: openai.AsyncOpenAI):
    response = await client.responses.create(model="fake", input="One", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="fake", input="Two", previous_response_id=response.id)
    assert caught.value.code == "not_found"


async def test_without_an_end_there_is_no_done(app: Any):
    answer = await create(app, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert b"[DONE]" not in answer.body
    assert named_events(answer)[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]},
         "input[0].content[0].type", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"max_output_tokens": "7"}, "max_output_tokens", "invalid_type"),
        ({"max_output_tokens": 1000}, "max_output_tokens", "invalid_value"),
        ({"input": "x" * 200, "max_output_tokens": None}, "input", "context_length_exceeded"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "unsupported_value"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
         "tool_choice.tools", "invalid_value"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema",
         "missing_required_parameter"),
        ({"truncation": "some"}, "truncation", "invalid_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"max_tokens": 3}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"include": ["all"]}, "include[0]", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "string_above_max_length"),
        ({"metadata": {str(k): "" for k in range(17)}}, "metadata", "object_above_max_properties"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "unsupported_parameter"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id", "not_found"),
    ],
)  # fmt: skip
async def test_a_field_at_fault_is_named(any_app: Any, fields: dict[str, Any], param: str, code: str):
    answer = await create(any_app, **fields)
    assert answer.status == (404 if code in ("model_not_found", "not_found") else 400), answer.body
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


async def test_the_extra_sampling_fields_and_openais_harmless_ones_are_taken(app: Any, engine: FakeEngineClient):
    answer = await create(
        app, top_k=5, min_p=0.1, repetition_penalty=1.1, seed=7, stop_token_ids=[3], ignore_eos=True, priority=1,
        reasoning={"effort": "low", "summary": "auto"}, text={"format": {"type": "text"}, "verbosity": "low"},
        truncation="disabled", parallel_tool_calls=False, user="me", safety_identifier="me", prompt_cache_key="k",
        service_tier="auto", max_tool_calls=3, include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert answer.status == 200, answer.body
    params = engine.admitted[-1].sampling_params
    assert (params.top_k, params.min_p, params.seed, params.stop_token_ids) == (5, 0.1, 7, (3,))
    response = answer.json()
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (response["parallel_tool_calls"], response["user"], response["max_tool_calls"]) == (False, "me", 3)


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns_where_that_is_asked_for(app: Any):
    turns = [{"role": "user", "content": letter * 50} for letter in "abc"]
    assert (await create(app, input=turns)).json()["error"]["code"] == "context_length_exceeded"
    answer = (await create(app, input=turns, truncation="auto")).json()
    assert (answer["output"][0]["content"][0]["text"], answer["truncation"]) == ("b" * 7, "auto")


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order")],
)
async def test_a_query_at_fault_is_named(client: openai.AsyncOpenAI, query: str, param: str):
    response = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.get(f"/responses/{response.id}/input_items?{query}", cast_to=object)
    assert caught.value.param == param


async def test_the_end_of_a_page_that_is_unknown_is_not_found(client: openai.AsyncOpenAI):
    response = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.get(f"/responses/{response.id}/input_items?after=x", cast_to=object)
    assert (caught.value.param, caught.value.code) == ("after", "not_found")


@pytest.mark.parametrize(("query", "param"), [("stream=x", "stream"), ("stream=true", "stream")])
async def test_only_a_stream_of_the_background_can_be_read_again(client: openai.AsyncOpenAI, query: str, param: str):
    response = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.get(f"/responses/{response.id}?{query}", cast_to=object)
    assert caught.value.param == param


async def test_a_response_that_was_waited_for_cannot_be_cancelled(client: openai.AsyncOpenAI):
    response = await client.responses.create(model="fake", input="One", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(response.id)
