"""`llmstack run-batch` over the demo model: in its own process, over a server, and again after it was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmstack_command.main import main

COMMAND = [sys.executable, "-m", "llmstack_command", "run-batch"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "LLMSTACK_MODEL": "llmstack-demo"}  # whatever is installed


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


REQUESTS = [
    request("text", "/v1/completions", prompt="Once upon a time", max_tokens=8, temperature=0),
    request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, seed=7),
    request("vectors", "/v1/embeddings", input=["a fox", "a crow"]),
    request("too many", "/v1/completions", prompt="x", n=1000),
    request("nowhere", "/v1/elephants"),
    request("text", "/v1/completions", prompt="the same custom_id again"),
]


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_batch(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)


def check_answers(lines: list[dict[str, Any]]) -> None:
    """The answers to `REQUESTS` and a line of nonsense after them."""
    answers = {line["custom_id"]: line["response"] for line in lines if line["response"] is not None}
    assert set(answers) == {"text", "chat", "vectors", "too many", "nowhere"}
    assert [answers[name]["status_code"] for name in ("text", "chat", "vectors")] == [200, 200, 200]
    assert answers["text"]["body"]["usage"]["completion_tokens"] == 8
    assert answers["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(answers["vectors"]["body"]["data"]) == 2
    assert answers["too many"]["body"]["error"]["param"] == "n"
    assert answers["nowhere"]["body"]["error"]["code"] == "unknown_url"
    faults = {line["error"]["line"]: line["error"]["code"] for line in lines if line["error"] is not None}
    assert faults == {6: "duplicate_custom_id", 7: "invalid_json_line"}


@pytest.mark.parametrize("is_remote", [False, True])
def test_every_line_gets_its_answer_here_and_over_a_server(is_remote: bool, demo_server: Any, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [*REQUESTS, "nonsense\n"]), tmp_path / "out.jsonl"
    where = ["--url", demo_server.url + "/v1"] if is_remote else []
    ran = run_batch("-i", source, "-o", target, *where)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("3 answered, 2 answered with an error, 2 wrong lines\n")
    check_answers(read(target))
    again = run_batch("-i", source, "-o", target)  # without a model, since nothing is to be asked
    assert again.stderr.endswith("7 already in the output\n")
    check_answers(read(target))


def test_the_answers_are_those_of_the_server(demo_server: Any, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", REQUESTS[:2]), tmp_path / "out.jsonl"
    assert run_batch("-i", source, "-o", target).returncode == 0
    for line in read(target):
        asked = next(entry for entry in REQUESTS if entry["custom_id"] == line["custom_id"])
        _, body, _ = demo_server.post(asked["url"], asked["body"])
        assert line["response"]["body"]["choices"] == body["choices"]
        assert line["response"]["body"].keys() == body.keys()


def test_what_the_server_reads_out_of_a_text_is_read_here_too(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"is_fox": {"type": "boolean"}}, "required": ["is_fox"]}
    schema["additionalProperties"] = False
    hello = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    requests = [
        request("call", "/v1/chat/completions", messages=hello, max_tokens=400, seed=1,
                tools=[tool], tool_choice="required"),
        request("object", "/v1/chat/completions", messages=hello, max_tokens=400, seed=1,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        request("response", "/v1/responses", input="Hi", max_output_tokens=16),
    ]  # fmt: skip
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    ran = run_batch("-i", source, "-o", target, "--tool-call-parser", "hermes")
    assert ran.returncode == 0, ran.stderr
    bodies = {line["custom_id"]: line["response"]["body"] for line in read(target)}
    call, *_ = bodies["call"]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert isinstance(json.loads(call["function"]["arguments"])["is_fox"], bool)
    assert isinstance(json.loads(bodies["object"]["choices"][0]["message"]["content"])["is_fox"], bool)
    assert bodies["response"]["output"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    "sig", [*(pytest.param(sig, marks=pytest.mark.full) for sig in (signal.SIGTERM, signal.SIGKILL)), signal.SIGINT]
)
def test_a_run_that_was_stopped_goes_on_where_it_stopped(sig: signal.Signals, demo_server: Any, tmp_path: Path) -> None:
    requests = [request(f"r{k}", "/v1/completions", prompt=f"Day {k}", max_tokens=30, seed=k) for k in range(40)]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    arguments = ["-i", str(source), "-o", str(target), "--url", demo_server.url, "--max-concurrency", "2"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as stopped:
        deadline = time.monotonic() + 60
        while (not target.exists() or target.read_text().count("\n") < 5) and time.monotonic() < deadline:
            time.sleep(0.01)
        stopped.send_signal(sig)
        _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == (-9 if sig == signal.SIGKILL else 128 + sig)
    assert "run the same command again to continue" in errors or sig == signal.SIGKILL
    before = target.read_text()
    num_before = before.count("\n")
    assert 5 <= num_before < 40
    target.write_text(before + '{"id":"batch_req_1","custom_id":"r5')  # torn
    again = run_batch(*arguments)
    assert again.stderr.endswith(f"{40 - num_before} answered, {num_before} already in the output\n")
    lines = read(target)
    assert sorted(line["custom_id"] for line in lines) == sorted(entry["custom_id"] for entry in requests)
    assert all(line["response"]["status_code"] == 200 for line in lines)


def test_ctrl_c_while_the_model_is_loaded_ends_everything(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", REQUESTS)
    command = [*COMMAND, "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as stopped:
        process = psutil.Process(stopped.pid)
        deadline = time.monotonic() + 60
        while not process.children() and time.monotonic() < deadline:
            time.sleep(0.01)
        engines = process.children()
        stopped.send_signal(signal.SIGINT)
        _, errors = stopped.communicate(timeout=60)
    assert engines
    assert stopped.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert not alive


def test_a_pipe_in_and_a_pipe_out(demo_server: Any) -> None:
    text = "".join(json.dumps(entry) + "\n" for entry in REQUESTS[:3])
    ran = run_batch("-i", "-", "-o", "-", "--url", demo_server.url, text=text)
    assert ran.returncode == 0, ran.stderr
    assert {json.loads(line)["custom_id"] for line in ran.stdout.splitlines()} == {"text", "chat", "vectors"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-i", "no-such-file", "-o", "out"], 2, "--input-file: no-such-file"),
        (["-i", "in", "-o", "in"], 2, "not overwritten"),
        (["-i", "in", "-o", "out", "--url", "nowhere"], 2, "--url"),
        (["-i", "in", "-o", "out", "--url", "http://127.0.0.1:1", "gpt2"], 2, "model"),
        (["-i", "in", "-o", "out", "no/such/folder"], 2, "no/such/folder"),
        (["-i", "in"], 2, "--output-file"),
        (["-i", "in", "-o", "out", "--max-concurency", "2"], 2, "did you mean '--max-concurrency'?"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in"), REQUESTS[:1])
    assert main(["run-batch", *arguments]) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert words in written.err
    assert written.err.count("\n") == 1
