"""A live, messy run is recorded and every decision of it derived again, by other processes without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmstack_step_log import read_step_log
from llmstack_step_log.records import RequestAdded, RequestsAborted
from llmstack_step_log.replay import verify

SMALL_POOL = ("--num-kv-blocks", "24", "--max-model-len", "128", "--block-size", "8", "--max-num-batched-tokens", "48")
STORY = "Once upon a time there was a little fox who lived by the sea and"


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmstack_command", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def make_a_mess(url: str, model: str) -> None:
    """Requests of several kinds that arrive while others run; every third one is given up after a few tokens."""

    async def complete(index: int) -> None:
        await asyncio.sleep(0.005 * index)
        prompt = f"{STORY} {'never ' * (index % 5)}went home"
        if index % 3 == 0:
            stream = await client.completions.create(model=model, prompt=prompt, max_tokens=80, seed=index, stream=True)
            await anext(aiter(stream))  # the only one, perhaps: a slow reader gets several tokens in a chunk
            await stream.close()
            return
        if index % 3 == 1:
            count, how = 3, {"max_tokens": 30 + index, "stop": [" sea", "."]}
        else:  # long ones, all at once: the pool holds two of them
            count, how = 1, {"max_tokens": 90, "extra_body": {"ignore_eos": True}}
        answer = await client.completions.create(model=model, prompt=prompt, n=count, seed=index, **how)
        assert len(answer.choices) == count

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        await asyncio.gather(*(complete(index) for index in range(18)))


@pytest.fixture(scope="module")
def log_path(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "run.steps"
    with serve(*SMALL_POOL, "--record-steps", str(path), "--enable-control-routes") as server:
        model = server.client.models.list().data[0].id
        asyncio.run(make_a_mess(server.url, model))
        assert server.metric("llmstack:num_preemptions_total") > 0
        assert server.metric("llmstack:prefix_cache_hits_total") > 0
        assert server.get_json("/server_info")["config"]["record_steps"] == str(path)
    return path


def test_a_messy_run_is_replayed_bit_for_bit(log_path: Path) -> None:
    run = read_step_log(log_path)
    events = list(run.events())
    added = [event.request for event in events if isinstance(event, RequestAdded)]
    assert len(added) == 18 + 2 * 6
    assert sum(isinstance(event, RequestsAborted) for event in events) > 0
    assert run.is_closed
    assert verify(run).digest == run.last.digest.hex()
    done = replay(log_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(added)} requests" in done.stdout
    assert f"every decision is as recorded, hash {run.last.digest.hex()}" in done.stdout


def test_the_log_holds_no_text_and_only_its_owner_reads_it(log_path: Path) -> None:
    assert b" sea" not in log_path.read_bytes()
    assert log_path.stat().st_mode & 0o077 == 0


def test_another_pool_decides_differently_and_the_first_decision_is_shown(log_path: Path) -> None:
    done = replay(log_path, "--against", "num_blocks=25")
    assert done.returncode == 1
    assert "the first that differs under num_blocks=25 is at step" in done.stdout
    assert len(done.stdout.splitlines()) > 2
    assert replay(log_path, "--against", "fcfs").returncode == 0


def test_a_file_that_cannot_be_written_ends_the_start_with_one_line(launch: Callable[..., Any], tmp_path: Path) -> None:
    server = launch("--record-steps", str(tmp_path / "absent" / "run.steps"))
    assert server.process.wait(60) == 1
    assert "cannot write --record-steps" in server.log
    assert "Traceback" not in server.log


def test_settings_are_found_for_a_log_and_checked_on_a_real_server(log_path: Path, demo_server: Any) -> None:
    words = ["tune", "--log", str(log_path), "--target", "ttft_p99<60s", "--max-runs", "4", "--json"]
    words += ["--check-url", demo_server.url, "--check-requests", "6"]
    done = subprocess.run(
        [sys.executable, "-m", "llmstack_command", *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["requests"] == 30
    assert found["tried"] == 4
    # The same scheduler on the same requests; how long its steps take is only estimated.
    assert found["unchanged"]["ttft_s"]["p99"] > 0
    measured = found["check"]["measured"]
    assert (measured["requests"], measured["failed"]) == (6, 0)
    assert measured["ttft_s"]["p99"] > 0
    assert found["check"]["expected"]["ttft_s"]["p99"] > 0


@pytest.mark.full
def test_a_check_starts_the_server_with_the_found_settings(log_path: Path) -> None:
    words = ["tune", "--log", str(log_path), "--target", "ttft_p99<60s", "--max-runs", "2", "--json", "--check"]
    words += ["--serve-cmd", f"llmstack serve {' '.join(SMALL_POOL)}", "--check-requests", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "llmstack_command", *words], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["command"][:2] == ["llmstack", "serve"]
    assert (found["check"]["measured"]["requests"], found["check"]["measured"]["failed"]) == (4, 0)


@pytest.mark.full
def test_a_server_reports_what_its_shadow_has_found(serve: Callable[..., Any]) -> None:
    with serve("--shadow-scheduler", "max_num_seqs=8", "--max-num-seqs", "2") as server:
        model, end_s = server.client.models.list().data[0].id, time.monotonic() + 120
        while True:  # the cost model takes some prompts, and reports come once a second
            server.client.completions.create(model=model, prompt=STORY, max_tokens=8)
            text = httpx.get(f"{server.url}/metrics").text
            counts = [line for line in text.splitlines() if line.startswith("llmstack:shadow_requests_total")]
            if counts and float(counts[0].rsplit(" ", 1)[1]) > 0:
                break
            assert time.monotonic() < end_s
            time.sleep(0.2)
        assert 'plane="unchanged"' in text
