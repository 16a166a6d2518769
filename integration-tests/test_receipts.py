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
from other_weights import MODEL, write_checkpoints

from llmstack_model_runner.testing import write_random_adapter

pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")

TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
STORY = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "n": 2}


def llmstack(*arguments: object) -> subprocess.CompletedProcess[str]:
    if arguments[0] == "verify" and "--model" not in arguments:
        arguments = (*arguments, "--model", "llmstack-demo")
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


def verified(answer: dict[str, Any], folder: Path, *options: object) -> str:
    """What the command says about an answer after the line about its signature, or its error."""
    (folder / "answer.json").write_text(json.dumps(answer))
    found = llmstack("verify", folder / "answer.json", *options)
    signed, *lines = found.stdout.splitlines()
    assert signed.startswith("signed by ")
    return "\n".join(lines) or found.stderr.strip()


def test_an_answer_with_an_adapter_is_computed_again_with_it(serve: Callable[..., Any], tmp_path: Path) -> None:
    first, other = (
        write_random_adapter(tmp_path / f"a{seed}", MODEL, TARGETS, seed, rank=4, spread=0.3) for seed in (1, 2)
    )
    llmstack("receipt-key", tmp_path / "key.pem")
    adapters = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"a={first}", f"b={other}"]
    options = ["--receipts", str(tmp_path / "key.pem"), "--max-lora-rank", "32"]
    with serve(*options, *adapters) as server, ThreadPoolExecutor(3) as pool:
        bodies = [STORY | {"return_token_ids": True, "model": name} for name in ("a", "b", "llmstack-demo")]
        answers = [answer for _, answer, _ in pool.map(lambda body: server.post("/v1/completions", body), bodies)]
    assert [one["receipt"]["adapter"] for one in answers] == ["a", "b", None]
    for answer, given in zip(answers, (["--adapter", first], ["--adapter", other], []), strict=True):
        assert verified(answer, tmp_path, *given) == "all tokens are equal"
    digest, differences = verified(answers[0], tmp_path, "--adapter", other).split("\n", 1)
    assert digest.startswith(
        f"the computation differs: the adapter's digest is {answers[0]['receipt']['adapter_digest']} in"
    )
    assert differences.startswith("prompt 0, completion 0: token ")
    assert verified(answers[0], tmp_path).endswith("the adapter 'a' was used: give its folder by --adapter")


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
    first, later = (("--model", tmp_path / name) for name in ("first", "next"))
    assert verified(moved["answers"][0], tmp_path, *first).splitlines() == [
        "after a reload it went on in another engine core: larger",
        "all tokens are equal",
    ]
    assert verified(finished["answers"][0], tmp_path, *first) == "all tokens are equal"
    assert verified(new[0], tmp_path, *later) == "all tokens are equal"
    assert verified(new[0], tmp_path, *first).startswith("the computation differs: weights is")
