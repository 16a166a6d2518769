"""A server that is killed as a whole: the next one has its responses, and finishes those of the background."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

PROMPT = "Tell me a long story about a fox."
CHAT: Any = [{"role": "user", "content": PROMPT}]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "extra_body": {"seed": 7}},
    "drawn": {"temperature": 1.0},
}


def wait_for_end(client: openai.OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def started_chat(client: openai.OpenAI, model: str, name: str) -> tuple[str, str]:
    """The id of a stream with an `Idempotency-Key`, and the text of its first events."""
    settings = SETTINGS[name] | {"extra_headers": {"Idempotency-Key": name}}
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=CHAT, max_tokens=200, stream=True, **settings
    )
    first = itertools.islice(raw.parse(), 8)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in first if chunk.choices)
    return raw.headers["x-llmstack-stream-id"], text


def rest_of(server: Any, stream_id: str, after: int) -> list[Any]:
    raw = server.client.get(f"/streams/{stream_id}", cast_to=str, options={"params": {"after": after}})
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.full
def test_a_server_that_is_killed_as_a_whole_finishes_the_background_after_its_restart(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    server = launch("--state-dir", str(tmp_path / "state"))
    server.wait_until_ready()
    fields = {"model": server.client.models.list().data[0].id, "input": PROMPT, "max_output_tokens": 200}
    undisturbed = {
        name: server.client.responses.create(**fields, **settings)
        for name, settings in SETTINGS.items()
        if name != "drawn"
    }
    undisturbed_chats = {
        name: server.client.chat.completions.create(model=fields["model"], messages=CHAT, max_tokens=200, **settings)
        .choices[0].message.content
        for name, settings in SETTINGS.items()
        if name != "drawn"
    }  # fmt: skip
    ids = {
        name: server.client.responses.create(**fields, **settings, background=True).id
        for name, settings in SETTINGS.items()
    }
    stream = server.client.responses.create(**fields, **SETTINGS["seeded"], background=True, stream=True)
    seen = list(itertools.islice(stream, 12))
    chats = {name: started_chat(server.client, fields["model"], name) for name in SETTINGS}
    server.kill_all()

    server = launch("--state-dir", str(tmp_path / "state"))
    server.wait_until_ready()
    ended = {name: wait_for_end(server.client, response_id) for name, response_id in ids.items()}
    for name, whole in undisturbed.items():
        assert server.client.responses.retrieve(whole.id).output_text == whole.output_text
        assert (ended[name].output_text, ended[name].status) == (whole.output_text, whole.status)
        assert ended[name].usage.output_tokens == whole.usage.output_tokens
    assert ended["drawn"].output_text
    rest = list(
        server.client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    )
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    texts = [event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta"]
    assert "".join(texts) == undisturbed["seeded"].output_text
    assert "responses in the background go on" in server.log
    for name, (stream_id, begun) in chats.items():
        whole = text_of(rest_of(server, stream_id, 0))
        assert whole.startswith(begun)
        assert len(whole) > len(begun)
        if name != "drawn":
            assert whole == undisturbed_chats[name]
    assert "Traceback" not in server.log
