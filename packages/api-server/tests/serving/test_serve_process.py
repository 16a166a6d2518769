"""`llmstack serve` as a process of its own, with a real engine process and the official client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from llmstack_llm.testing import write_model_folder

HELLO: Any = [{"role": "user", "content": "Hello"}]


class Process:
    """One server over the echoing runner, its log, and its address."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log_path = log
        command = [sys.executable, "-m", "llmstack_command", "serve", *arguments, "--runner", "echo", "--port", "0"]
        with log.open("wb") as file:
            self.popen = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log)
            if found:
                return found
            if self.popen.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log, exit code {self.popen.poll()}:\n{self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), config={"n_positions": 512})


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = Process(tmp_path_factory.mktemp("log") / "log", str(folder), "--served-model-name", "echo")
    try:
        running.wait_for_log("is ready on")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def url(process: Process) -> str:
    return process.wait_for_log(r"is ready on (http://\S+)").group(1)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_the_official_client_reads_completions(client: openai.OpenAI):
    answer = client.completions.create(model="echo", prompt="Hello", max_tokens=7, temperature=0, logprobs=1)
    assert answer.choices[0].text == "HelloHe"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    chunks = list(client.completions.create(model="echo", prompt="Hello", max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "HelloHe"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_official_client_reads_chats(client: openai.OpenAI):
    answer = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "Hello"
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 5


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="nobody", prompt="a")
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="echo", prompt="a", n=130)
    assert bad.value.code == "integer_above_max_value"
    assert [model.id for model in client.models.list()] == ["echo"]


def test_server_info_and_metrics_tell_what_runs(client: openai.OpenAI, url: str):
    with urllib.request.urlopen(f"{url}/server_info") as response:
        info = json.load(response)
    assert (info["state"], info["engine"]["device"]) == ("Ready", "cpu")
    assert info["uvloop"] is True
    assert "plain fallback" in info["chat_template"]
    client.completions.create(model="echo", prompt="Hello", max_tokens=3)
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    assert re.search(r'vllm:generation_tokens_total\{engine="0",model_name="echo"\} [1-9]', text)
    assert 'llmstack:request_success_total{engine="0",finished_reason="length",model_name="echo"}' in text


def test_a_client_that_leaves_frees_its_blocks(client: openai.OpenAI, url: str):
    def metric(name: str) -> float:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            return float(re.search(rf"^llmstack:{name}{{.*}} (\S+)", response.read().decode(), re.MULTILINE).group(1))

    stream = client.completions.create(model="echo", prompt="Hello", max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while metric("num_requests_running") or metric("kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_api_process_is_small_and_the_log_says_ready_once(client: openai.OpenAI, process: Process):
    client.completions.create(model="echo", prompt="Hello", max_tokens=3)
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 150 * 1024
    assert process.log.count("is ready on") == 1


def test_every_stage_of_the_start_is_in_the_log_and_the_metrics(url: str, process: Process):
    with urllib.request.urlopen(f"{url}/metrics") as response:
        exported = response.read().decode()
    for stage in ("bind socket", "start engine process", "load tokenizer", "start uvicorn", "engine: load_model"):
        assert re.search(rf"^  {stage} +\d+\.\d+ s$", process.log, re.MULTILINE), process.log
        assert f'llmstack:startup_seconds{{stage="{stage}"}}' in exported


def test_a_signal_ends_it_with_0_and_no_child_left(folder: Path, tmp_path: Path):
    process = Process(tmp_path / "log", str(folder))
    process.wait_for_log("is ready on")
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text().split()
    assert len(children) >= 1
    assert process.stop() == 0
    assert [pid for pid in children if os.path.exists(f"/proc/{pid}")] == []
    assert "Traceback" not in process.log


def test_a_killed_engine_ends_it_with_1_and_one_clear_line(folder: Path, tmp_path: Path):
    process = Process(tmp_path / "log", str(folder), "--max-engine-restarts", "0")
    url = process.wait_for_log(r"is ready on (http://\S+)").group(1)
    with urllib.request.urlopen(f"{url}/server_info") as response:
        os.kill(json.load(response)["engine"]["pid"], signal.SIGKILL)
    assert process.popen.wait(60) == 1
    assert process.log.count("engine core died") == 1
    assert "Traceback" not in process.log


def test_a_missing_model_is_one_line(tmp_path: Path):
    process = Process(tmp_path / "log", str(tmp_path / "absent"))
    assert process.popen.wait(60) == 2
    assert str(tmp_path / "absent") in process.log
    assert "Traceback" not in process.log
