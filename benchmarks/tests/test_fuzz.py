"""A short run of the fuzzers; `make fuzz` runs them for long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import fuzz_batches
import fuzz_bodies
import fuzz_parsers
import fuzz_requests
import fuzz_schema
import pytest

from llmstack_server.app import build_app
from llmstack_server.testing.asgi_client import Answer, call


def test_odd_requests_get_answers_of_the_contract() -> None:
    counts = asyncio.run(fuzz_requests.fuzz(1000, seed=1))
    assert sum(counts.values()) == 1000
    assert counts["200"] > 100


async def test_each_route_that_takes_json_is_tried_with_a_body_that_it_accepts() -> None:
    apps = [build_app(fuzz_requests.make_state(num_labels)[0]) for num_labels in fuzz_requests.NUM_LABELS]
    operations = {path: ways.get("post", {}) for path, ways in apps[0].openapi()["paths"].items()}
    contents = {path: operation.get("requestBody", {}).get("content", {}) for path, operation in operations.items()}
    assert fuzz_bodies.ROUTES.keys() == {path for path, content in contents.items() if "application/json" in content}
    for path, body in fuzz_bodies.ROUTES.items():
        answers = [await call(app, "POST", path, body) for app in apps]
        assert 200 in {answer.status for answer in answers}, (path, answers[0].body)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, {}, [b'{"error":{"message":"m","type":"t"}}']),
        Answer(400, {}, [b'{"error":{"message":"Traceback","type":"t"}}']),
        Answer(400, {}, [b'{"error":{"message":"' + b"m" * 3000 + b'","type":"t"}}']),
        Answer(400, {}, [b'{"error":{"message":"","type":"t"}}']),
    ],
    ids=["a failure", "the server's insides", "a long error", "an error without words"],
)
def test_a_broken_answer_is_found(answer: Answer) -> None:
    with pytest.raises(fuzz_requests.FuzzError):
        fuzz_requests.check(answer)


def test_odd_batches_end_with_an_answer_for_each_line() -> None:
    counts = asyncio.run(fuzz_batches.fuzz(10, seed=1))
    assert counts.total() >= 10


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([("a", 200)], None),
        ([("a", 200), ("a", 200)], None),
        ([("a", 200), ("b", 500)], None),
        ([("a", 200), ("b", 200)], "internal_error"),
    ],
    ids=["one too few", "one twice", "a failure", "a batch that failed"],
)
def test_a_wrong_end_of_a_batch_is_found(answers: list[tuple[str, int]], code: str | None) -> None:
    batch = {
        "status": "completed",
        "request_counts": {"total": 2, "completed": 2, "failed": 0},
        "errors": code and {"data": [{"code": code}]},
    }
    lines = [{"custom_id": name, "response": {"status_code": status}} for name, status in answers]
    with pytest.raises(fuzz_batches.FuzzError):
        fuzz_batches.check_batch(batch, lines)


def test_new_branches_are_looked_for_in_what_parses() -> None:
    code = "import fuzz_parsers\nfor one in fuzz_parsers.parsing_functions(): print(one.__module__, one.__name__)"
    command = [sys.executable, "-c", code]
    folder = Path(fuzz_parsers.__file__).parent
    names = set(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines())
    assert {
        "llmstack_server.web.json_body decode_object",
        "llmstack_gguf.header read_header",
        "PIL.Image open",
    } <= names
    assert not any(name.startswith(("asyncio", "json")) for name in names)


@pytest.mark.parametrize("target", fuzz_parsers.TARGETS)
def test_parsers_refuse_by_their_own_errors(target: str) -> None:
    fuzz_parsers.run_random(target, 200, seed=2)
    with pytest.raises(ValueError, match="not refused"):
        _run_broken(target)


def _run_broken(target: str) -> None:
    def broken(data: bytes) -> None:
        raise ValueError("not refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fuzz_parsers.TARGETS, target, broken)
        fuzz_parsers.run_random(target, 1, seed=2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_server_does_what_its_openapi_document_says() -> None:
    command = fuzz_schema.find_command()
    if command is None:
        pytest.skip("the command schemathesis is not installed")
    assert fuzz_schema.run(command, max_examples=2, seed=1) == 0
