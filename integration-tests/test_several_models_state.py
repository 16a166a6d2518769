"""Answers of several models that outlive their server: stored, repeated by a key, and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from other_weights import write_checkpoints

KEY = {"Idempotency-Key": "a key of mine"}
COMPLETION = {"model": "second", "prompt": "The", "max_tokens": 8, "temperature": 0}
LONG = {"max_output_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def start(launch: Callable[..., Any], tmp_path: Path) -> Callable[[], Any]:
    write_checkpoints(tmp_path)
    file = tmp_path / "models.yaml"
    file.write_text(
        "memory: 1100M\nmodels:\n"
        f"  org/first:\n    model: {tmp_path / 'first'}\n    memory: 500M\n"
        f"  second:\n    model: {tmp_path / 'next'}\n    memory: 500M\n"
    )
    file.chmod(0o600)

    def start() -> Any:
        line = (
            "--models",
            str(file),
            "--state-dir",
            str(tmp_path / "state"),
            "--api-key",
            "sesame",
            "--shutdown-timeout",
            "0.1",
        )
        server = launch(*line, env={"LLMSTACK_MODEL": ""})
        server.wait_until_ready()
        return server

    return start


@pytest.mark.parametrize("end", ["killed", pytest.param("stopped", marks=pytest.mark.full)])
def test_a_restart_finds_the_answers_of_each_model(start: Callable[[], Any], tmp_path: Path, end: str):
    server = start()
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": "Bearer sesame"}) as client:
        stored = [
            client.post("/v1/responses", json={"model": model, "input": "The", "max_output_tokens": 8}).json()
            for model in ("org/first", "second")
        ]
        answer = client.post("/v1/completions", json=COMPLETION, headers=KEY).json()
        background = client.post(
            "/v1/responses", json={"model": "org/first", "input": "Once", "background": True, "stream": True, **LONG}
        )
        assert background.status_code == 200, background.text
        whole = _text_of(background.text)
        body = {"model": "org/first", "input": "Once", "background": True, **LONG}
        begun = client.post("/v1/responses", json=body).json()["id"]
    if end == "killed":
        server.kill_all()
        server.close_client()
    else:
        assert server.stop() == 0
    names = {path.name.split(".")[0] for path in (tmp_path / "state" / "models").iterdir()}
    assert names == {"org%2Ffirst", "second"}

    server = start()
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": "Bearer sesame"}) as client:
        found = [client.get(f"/v1/responses/{one['id']}").json() for one in stored]
        assert [one["output"] for one in found] == [one["output"] for one in stored]
        server.wait_for(lambda: _response(client, begun)["status"] == "incomplete", "the response that was cut")
        assert _response(client, begun)["output"][0]["content"][0]["text"] == whole
        statuses = {one["id"]: one["status"]["value"] for one in client.get("/v1/models").json()["data"]}
        assert statuses == {"org/first": "loaded", "second": "unloaded"}, "the one with something left to do"
        assert client.post("/v1/completions", json=COMPLETION, headers=KEY).json() == answer
        other = client.post("/v1/completions", json={**COMPLETION, "prompt": "An"}, headers=KEY)
        assert other.json()["error"]["code"] == "idempotency_key_reused"
        following = {"model": "second", "previous_response_id": stored[1]["id"], "input": "And"}
        assert client.post("/v1/responses", json=following).status_code == 200
    assert server.stop() == 0


def _response(client: httpx.Client, response_id: str) -> Any:
    return client.get(f"/v1/responses/{response_id}").json()


def _text_of(events: str) -> str:
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1])
    assert last["type"] == "response.incomplete"
    text: str = last["response"]["output"][0]["content"][0]["text"]
    return text
