"""What the official Python client builds on the API: assembled streams, parsed objects, tools, raw answers, async."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

MODEL = "llmstack-demo"
HELLO: Any = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    return demo_server.client


class Animal(BaseModel):
    """What the model is made to say."""

    kind: Literal["fox", "crow"]
    age: int
    is_hungry: bool


TOOL = openai.pydantic_function_tool(Animal, name="show_animal")


def test_the_helper_for_streams_assembles_the_whole_answer(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    said = client.chat.completions.create(**arguments).choices[0].message.content
    arguments |= {"stop": said[-5:-1], "logprobs": True, "top_logprobs": 2}  # the helper takes no answer that was cut
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert [event.content for event in events if event.type == "content.done"] == [whole.choices[0].message.content]
    assert final.choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.choices[0].finish_reason == "stop"


def test_an_answer_is_parsed_into_the_model_it_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Animal, max_tokens=200, temperature=0.5, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Animal, max_tokens=200, temperature=0.5, seed=3
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


def test_an_answer_that_was_cut_is_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Animal, max_tokens=3)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "show_animal"}}])
def test_a_call_of_a_tool_is_parsed_and_assembled(client: openai.OpenAI, choice: Any) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 480, "seed": 5,
        "parallel_tool_calls": False,
    }  # fmt: skip
    (call,) = client.chat.completions.parse(**arguments).choices[0].message.tool_calls
    assert call.function.name == "show_animal"
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(**arguments) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    follow_up = client.chat.completions.create(
        model=MODEL,
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})],
            },
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"shown": True})},
        ],
        max_tokens=4,
    )
    assert follow_up.choices[0].message.role == "assistant"


def test_a_response_is_parsed_and_its_stream_assembled(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "input": "A fox.", "max_output_tokens": 200, "temperature": 0}
    parsed = client.responses.parse(**arguments, text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    with client.responses.stream(**arguments, text_format=Animal) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    assert final.output_parsed == parsed.output_parsed


def test_embeddings_come_as_floats_whatever_the_encoding(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model=MODEL, input=["a fox", "a crow"])  # the client asks for base64 by itself
    plain = client.embeddings.create(model=MODEL, input=["a fox", "a crow"], encoding_format="float")
    assert [entry.index for entry in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-4)


def test_raw_answers_carry_the_request_id(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="Once", max_tokens=2, extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.parse().choices[0].text
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=2)._request_id


def test_a_stream_can_be_left(client: openai.OpenAI, demo_server: Any) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    demo_server.wait_for(lambda: demo_server.get_json("/load")["server_load"] == 0, "idle server")


async def test_the_asynchronous_client_asks_many_at_once(demo_server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=8, seed=number, temperature=1, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*map(ask, range(16)))
        assert len(set(together)) > 1
        assert together[3] == await ask(3)
