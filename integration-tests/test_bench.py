"""`llmstack bench` against a real server, and a real start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_command.main import main
from llmstack_llm.testing import write_model_folder

ECHO = ("--runner", "llmstack_engine_core.testing:EchoModelRunner", "--num-kv-blocks", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("model") / "echo"))


def runs(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["servers"][0]["runs"])


def test_every_token_of_a_served_model_is_counted_over_both_routes(serve: Any, model: str, tmp_path: Path):
    path = tmp_path / "r.json"
    line = ["--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "6", "--max-concurrency", "4"]
    with serve(model, *ECHO) as server:
        for endpoint in ("/v1/completions", "/v1/chat/completions"):
            arguments = ["--base-url", server.url, "--endpoint", endpoint, "--tokenizer", model]
            assert main(["bench", "serve", *arguments, *line, "--output-json", str(path), "--save-detailed"]) == 0
            (run,) = runs(path)
            assert (run["completed"], run["failed"]) == (12, 0)
            assert run["total_output_tokens"] == 72
            assert all(record["has_usage"] for record in run["requests"])
            if endpoint == "/v1/completions":
                assert run["total_input_tokens"] == 240


def test_shared_prefixes_reach_the_servers_cache(serve: Any, model: str):
    line = ["--num-prompts", "8", "--random-input-len", "8", "--random-output-len", "2", "--max-concurrency", "1"]
    with serve(model, *ECHO) as server:
        arguments = ["--base-url", server.url, "--dataset-name", "shared-prefix", "--random-prefix-len", "64"]
        assert main(["bench", "serve", *arguments, *line, "--num-warmups", "0"]) == 0
        assert server.metric("vllm:prefix_cache_hits_total") >= 7 * 64


def test_a_cold_start_of_the_server_is_measured(model: str, capsys: pytest.CaptureFixture[str]):
    command = [sys.executable, "-m", "llmstack_command", "serve", model, *ECHO]
    assert main(["bench", "startup", "--num-iters", "1", "--", *command]) == 0
    out = capsys.readouterr().out
    assert "median first token (s)" in out
    assert "median pss (MiB)" in out
