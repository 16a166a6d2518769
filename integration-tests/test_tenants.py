"""A running server with several API keys and API processes: prefixes, steps and logs of each key."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llmstack_demo_model
from llmstack_step_log import read_step_log
from llmstack_step_log.records import RequestAdded
from llmstack_step_log.replay import verify

PROMPT = "Once upon a time there was a small dragon. " * 8
NUM_TRIES = 6


class Deployment:
    """A server with two processes, and the files that it was started with."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def call(self, key: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A request on a connection of its own, which any of the processes gets."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content = answer.read()
                return answer.status, json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def num_cached(self, key: str, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
        status, answer = self.call(key, "/v1/completions", body)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def deployment(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("tenants")
    model = folder / "echo"
    model.symlink_to(llmstack_demo_model.model_path())
    (folder / "keys").write_text("alice\nbob\n")
    (folder / "operators").write_text("root\n")
    arguments = [
        str(model), "--runner", "echo", "--served-model-name", "llmstack-demo", "--api-server-count", "2",
        "--api-key-file", str(folder / "keys"), "--operator-key-file", str(folder / "operators"), "--state-dir",
        str(folder / "state"), "--enable-control-routes", "--record-steps", str(folder / "steps"),
    ]  # fmt: skip
    with serve(*arguments) as server:
        yield Deployment(server, folder)


def test_cached_tokens_are_those_of_the_own_key_in_every_process(deployment: Deployment) -> None:
    assert deployment.num_cached("alice") == 0
    hits = [deployment.num_cached("alice") for _ in range(NUM_TRIES)]
    assert min(hits) > 0
    assert deployment.num_cached("bob") == 0
    assert deployment.num_cached("bob") == hits[0]
    assert deployment.num_cached("alice", cache_salt="s") == 0
    assert deployment.num_cached("bob", cache_salt="s") == 0
    assert deployment.num_cached("alice", cache_salt="s") == hits[0]


def test_every_process_shows_a_key_its_own_steps_and_beams(deployment: Deployment) -> None:
    ids = {}
    for key in ("alice", "bob"):
        body = {"prompt": key, "max_tokens": 3, "n": 2, "use_beam_search": True, "temperature": 0}
        status, answer = deployment.call(key, "/v1/completions", body)
        assert status == 200, answer
        ids[key] = answer["id"]
    for _ in range(NUM_TRIES):
        for key, foreign in (("alice", "bob"), ("bob", "alice")):
            log = deployment.call(key, "/steps")[1]
            shown = [row["id"] for step in log["steps"] for row in step["requests"]]
            shown += [event["id"] for event in log["events"]]
            assert any(ids[key] in name and "beam" in name for name in shown)
            assert ids[foreign] not in json.dumps(log)
        rows = [row for step in deployment.call("root", "/steps")[1]["steps"] for row in step["requests"]]
        assert all(any(one in row["id"] for row in rows) for one in ids.values())


def test_control_routes_are_the_operators_in_every_process(deployment: Deployment) -> None:
    for _ in range(NUM_TRIES):
        assert deployment.call("bob", "/reset_prefix_cache", {})[0] == 403
        assert deployment.call("root", "/reset_prefix_cache", {})[0] == 200


def test_a_response_is_its_keys_in_every_process(deployment: Deployment) -> None:
    _, made = deployment.call("alice", "/v1/responses", {"input": "One", "max_output_tokens": 2})
    for _ in range(NUM_TRIES):
        assert deployment.call("alice", f"/v1/responses/{made['id']}")[0] == 200
        status, answer = deployment.call("bob", f"/v1/responses/{made['id']}")
        assert (status, answer["error"]["code"]) == (404, "not_found")


def test_a_stopped_server_leaves_a_log_that_replays_with_tenants_and_no_secret(deployment: Deployment) -> None:
    deployment.num_cached("alice")
    deployment.num_cached("bob")
    deployment.server.stop()
    path, secret = deployment.folder / "steps", (deployment.folder / "state" / "deployment-secret").read_bytes()
    run = read_step_log(path)
    assert verify(run).digest == run.last.digest.hex()
    requests = [event.request for event in run.events() if isinstance(event, RequestAdded)]
    assert len({request.tenant for request in requests} - {""}) == 2
    assert all(request.cache_salt.startswith(request.tenant) for request in requests)
    for content in (path.read_bytes(), deployment.server.log.encode()):
        assert secret not in content
        assert secret.hex().encode() not in content
    assert stat.S_IMODE((deployment.folder / "state").stat().st_mode) == 0o700
