"""A real server loads other weights while streams run, by the commands of docs/reload.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from other_weights import write_checkpoints

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "reload.md").read_text(), re.MULTILINE | re.DOTALL)
PROMPT = "Once upon a time"
BODY = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


class Reloading:
    """A server that has other weights to load."""

    def __init__(self, server: Any, num_engines: int) -> None:
        self.server = server
        self.num_engines = num_engines

    def reload(self, command: str) -> dict[str, Any]:
        """The answer to a command of the page."""
        address = command.replace("http://127.0.0.1:8000", self.server.url)
        answer: dict[str, Any] = json.loads(subprocess.check_output(["bash", "-c", address]))
        assert "error" not in answer, answer
        return answer

    def text(self) -> str:
        status, answer, _ = self.server.post("/v1/completions", BODY)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def streamed(self) -> str:
        chunks = self.server.client.completions.create(
            model="m", stream=True, prompt=PROMPT, max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def stopped_streams(self, pool: Executor) -> tuple[list[int], list[Future[str]]]:
        """The engine cores, which stand still, and streams that began in them."""
        streams = [pool.submit(self.streamed) for _ in range(4)]
        self.server.wait_for(lambda: self.server.metric("llmstack:num_requests_running"), "a stream")
        pids: list[int] = self.server.engine_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids, streams

    def weights(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get_json("/v1/models")["data"][0]["weights"]
        return found

    def wait_for_engines(self) -> None:
        """Returns when the engine cores of before have gone."""
        self.server.wait_for(lambda: len(self.server.engine_pids()) == self.num_engines, "the engine cores of now")


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("options", "num_engines"),
    [
        pytest.param([], 1, id="one-of-each"),
        pytest.param(["--api-server-count", "2", "--data-parallel-size", "2"], 2, id="two-of-each"),
        pytest.param(["--tensor-parallel-size", "2"], 1, id="two-ranks"),
    ],
)
def test_streams_keep_their_weights_and_later_answers_have_the_next_ones(
    serve: Callable[..., Any], tmp_path: Path, options: list[str], num_engines: int
) -> None:
    write_checkpoints(tmp_path)
    start, to_next, to_larger = (
        command.replace("\\\n", "").replace("/models/", f"{tmp_path}/") for command in COMMANDS
    )
    with serve(*shlex.split(start)[2:], "--served-model-name", "m", *options) as server:
        reloading = Reloading(server, num_engines)
        first, first_weights = reloading.text(), reloading.weights()
        with ThreadPoolExecutor(4) as pool:
            # Settings of the same weights: streams move, and their texts are the same.
            _, streams = reloading.stopped_streams(pool)
            moved = reloading.reload(to_larger)
            assert moved["num_moved_requests"]
            assert [stream.result() for stream in streams] == [first] * 4
            assert moved["weights"]["numeric_contract_id"] == first_weights["numeric_contract_id"]
            # Other weights: those that run end with the old ones.
            reloading.wait_for_engines()
            pids, streams = reloading.stopped_streams(pool)
            answer = reloading.reload(to_next)
            other = reloading.text()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            texts = [stream.result() for stream in streams]
            assert texts.count(first) == answer["num_finishing_requests"] > 0
            assert set(texts) <= {first, other}
        assert other != first
        assert reloading.weights() == answer["weights"]
        assert answer["weights"]["digest"] != first_weights["digest"]
        reloading.wait_for_engines()
        status, refused, _ = server.post("/v1/reload", {"name": "start", "running": "move"})
        assert (status, refused["error"]["code"]) == (409, "reload_failed")
        assert "numeric contract" in refused["error"]["message"]
        reloading.wait_for_engines()
        assert server.post("/v1/reload", {"name": "start"})[0] == 200
        assert (reloading.text(), reloading.weights()) == (first, first_weights)
