"""A receipt of a real server is computed again, and a changed one is found out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from other_weights import write_checkpoints

pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")

STORY = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "n": 2}


def llmstack(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmstack_command", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_tokens_of_a_receipt_are_computed_again(serve: Callable[..., Any], tmp_path: Path) -> None:
    from llmstack_server.web.receipts import digest_of, open_signer

    key_file, receipt_file = tmp_path / "key.pem", tmp_path / "answer.json"
    public_key = llmstack("receipt-key", key_file).stdout.strip()
    with serve("--receipts", str(key_file)) as server:
        body = STORY | {"return_token_ids": True, "stop": ["zzz"], "logit_bias": {"5": -3.0}, "presence_penalty": 0.2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        silent = httpx.post(f"{server.url}/v1/completions", json=STORY, timeout=60).json()
    receipt_file.write_text(json.dumps(answer))
    equal = llmstack("verify", receipt_file, "--public-key", public_key)
    assert equal.returncode == 0, equal.stderr
    assert equal.stdout == f"signed by {public_key}\nall tokens are equal\n"

    receipt = answer["receipt"]
    token_ids = receipt["completions"][1]["token_ids"]
    token_ids[30] = (token_ids[30] + 1) % 100
    receipt["completions"][1]["tokens_sha256"] = digest_of(token_ids)
    receipt_file.write_text(json.dumps(open_signer(str(key_file)).signed(receipt)))
    other = llmstack("verify", receipt_file)
    assert other.returncode == 1
    assert f"prompt 0, completion 1: token 30 is {token_ids[30]} in the receipt, and " in other.stdout
    assert other.stdout.count("\n") == 2

    receipt_file.write_text(json.dumps(silent))
    assert llmstack("verify", receipt_file, "--signature-only").returncode == 0
    assert "return_token_ids" in llmstack("verify", receipt_file).stderr


def verified(answer: dict[str, Any], folder: Path, model: str) -> str:
    """What the command says about an answer and a model."""
    (folder / "answer.json").write_text(json.dumps(answer))
    return llmstack("verify", folder / "answer.json", "--model", folder / model).stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_receipts_follow_reloads_in_all_api_processes(serve: Callable[..., Any], tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    llmstack("receipt-key", tmp_path / "key.pem")
    larger = json.dumps({"name": "larger", "num_kv_blocks": 2048})
    options = ["--receipts", str(tmp_path / "key.pem"), "--enable-control-routes", "--api-server-count", "2"]
    body = STORY | {"return_token_ids": True, "max_tokens": 300, "ignore_eos": True, "seed": 3}
    with (
        serve(str(tmp_path / "first"), *options, "--reload-models", f"next={tmp_path / 'next'}", larger) as server,
        ThreadPoolExecutor(4) as pool,
    ):

        def answer() -> dict[str, Any]:
            found: dict[str, Any] = server.post("/v1/completions", body)[1]
            return found

        def reload(name: str, running: str) -> dict[str, Any]:
            """The reload's answer; the engine core of before stands still meanwhile."""
            server.wait_for(lambda: len(server.engine_pids()) == 1, "one engine core")
            running_now = [pool.submit(answer) for _ in range(3)]
            server.wait_for(lambda: server.metric("llmstack:num_requests_running") == 6, "the completions")
            (pid,) = server.engine_pids()
            os.kill(pid, signal.SIGSTOP)
            reloaded: dict[str, Any] = server.post("/v1/reload", {"name": name, "running": running})[1]
            if running == "finish":
                os.kill(pid, signal.SIGCONT)
            return reloaded | {"answers": [one.result() for one in running_now]}

        moved, finished = reload("larger", "move"), reload("next", "finish")
        new = [answer() for _ in range(4)]
    assert (moved["num_moved_requests"], finished["num_finishing_requests"]) == (6, 6)
    receipts = [one["receipt"] for one in (*moved["answers"], *finished["answers"], *new)]
    assert [one["weights_name"] for one in receipts] == ["start"] * 3 + ["larger"] * 3 + ["next"] * 4
    assert [[to["weights_name"] for to in one.get("moved_to", ())] for one in receipts] == [["larger"]] * 3 + [[]] * 7
    assert {one["weights"] for one in receipts[6:]} == {finished["weights"]["digest"]}
    assert {one["numeric_contract"] for one in receipts[:6]} == {moved["weights"]["numeric_contract_id"]}
    signed, *lines = verified(moved["answers"][0], tmp_path, "first").splitlines()
    assert lines == ["after a reload it went on in another engine core: larger", "all tokens are equal"]
    assert verified(finished["answers"][0], tmp_path, "first").splitlines() == [signed, "all tokens are equal"]
    assert verified(new[0], tmp_path, "next").splitlines() == [signed, "all tokens are equal"]
    assert "the computation differs: weights is" in verified(new[0], tmp_path, "first")
