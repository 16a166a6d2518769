"""A receipt of a real server is computed again, and a changed one is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

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
