"""The unmodified `openai` client and the Responses API, against the demo model in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "responses-and-messages.md"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Tell me a story about a fox."


@pytest.fixture
def client(demo_server: Any) -> openai.OpenAI:
    return demo_server.client


@pytest.fixture
def fields(client: openai.OpenAI) -> dict[str, Any]:
    return {"model": client.models.list().data[0].id, "input": PROMPT, "max_output_tokens": 24, "temperature": 0}


def poll(client: openai.OpenAI, response: Any) -> Iterator[Any]:
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
        yield response


def test_whole_streamed_and_background_responses_say_the_same(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = client.responses.create(**fields)
    assert whole.status in ("completed", "incomplete")
    assert whole.output_text
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    streamed = events[-1].response
    assert (streamed.output_text, streamed.status) == (whole.output_text, whole.status)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    *_, polled = poll(client, client.responses.create(**fields, background=True))
    assert (polled.output_text, polled.status) == (whole.output_text, whole.status)
    assert client.responses.retrieve(whole.id).output_text == whole.output_text


def test_it_says_what_a_chat_completion_says(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    response = client.responses.create(**fields, instructions="You tell stories.")
    chat = client.chat.completions.create(
        model=fields["model"],
        messages=[{"role": "system", "content": "You tell stories."}, {"role": "user", "content": PROMPT}],
        max_tokens=24,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_a_conversation_goes_on_with_what_was_said(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    first = client.responses.create(**fields)
    second = client.responses.create(**fields | {"input": "And then?"}, previous_response_id=first.id)
    by_hand = client.responses.create(
        **fields
        | {
            "input": [
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And then?"},
            ]
        }
    )
    assert second.output_text == by_hand.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant", "user"]


def test_a_cancelled_response_of_the_background_leaves_the_engine(
    client: openai.OpenAI, fields: dict[str, Any], demo_server: Any
) -> None:
    longest = fields | {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    pid = demo_server.engine_pid()
    os.kill(pid, signal.SIGSTOP)  # or the answer may end before it is cancelled
    try:
        response = client.responses.create(**longest, background=True)
        assert client.responses.cancel(response.id).status == "cancelled"
    finally:
        os.kill(pid, signal.SIGCONT)
    demo_server.wait_for(
        lambda: demo_server.metric("llmstack:num_requests_running") == 0, "idle engine after the cancellation"
    )
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream_of_the_background_can_be_taken_up_again(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    stream = client.responses.create(**fields, background=True, stream=True)
    seen = [next(stream) for _ in range(6)]
    stream.close()
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number))
    assert [event.sequence_number for event in seen + rest] == list(range(len(seen) + len(rest)))
    assert rest[-1].response.output_text == client.responses.create(**fields).output_text


def test_a_form_and_a_forced_call_hold(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    fields = fields | {"max_output_tokens": 200}
    jsonschema.validate(json.loads(client.responses.create(**fields, text={"format": form}).output_text), PERSON)
    tool = {"type": "function", "name": "person", "parameters": PERSON, "strict": True}
    chosen = {"type": "function", "name": "person"}
    call = client.responses.create(**fields, tools=[tool], tool_choice=chosen).output[0]
    assert (call.type, call.name) == ("function_call", "person")
    jsonschema.validate(json.loads(call.arguments), PERSON)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**fields, text={"format": form | {"schema": {"type": 7}}})
    assert (refused.value.param, refused.value.code) == ("text.format.schema", "invalid_json_schema")


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_page_run(demo_server: Any, tmp_path: Path, number: int) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[number]
    script = tmp_path / "example.py"
    script.write_text(code.replace("http://127.0.0.1:8000", demo_server.url))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_every_process_of_a_server_knows_every_response(serve: Any) -> None:
    """Each request comes over a connection of its own, which either process may accept."""
    with serve("--api-server-count", "2") as server:
        status, first, _ = server.post("/v1/responses", {"input": PROMPT, "max_output_tokens": 4})
        assert status == 200, first
        for _ in range(12):
            assert server.get_json(f"/v1/responses/{first['id']}") == first
            status, second, _ = server.post(
                "/v1/responses", {"input": "Go on", "previous_response_id": first["id"], "max_output_tokens": 4}
            )
            assert (status, second["previous_response_id"]) == (200, first["id"])
            first = second
        items = server.get_json(f"/v1/responses/{first['id']}/input_items?limit=100")["data"]
        assert len(items) == 25
