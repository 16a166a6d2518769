"""A real server loads other weights while streams run, by the commands of docs/reload.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import llmstack_demo_model

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path(llmstack_demo_model.__file__).parent / "model"
COMMANDS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "reload.md").read_text(), re.MULTILINE | re.DOTALL)
PROMPT = "Once upon a time"
BODY = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def write_checkpoints(folder: Path) -> None:
    """The demo model, and one of its shape with other weights."""
    shutil.copytree(MODEL, folder / "first")
    shutil.copytree(MODEL, folder / "next")
    (file,) = (folder / "next").glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].roll(1, 0).contiguous()
    save_file(tensors, file, {"format": "pt"})


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

        def reload(command: str) -> dict[str, Any]:
            address = command.replace("http://127.0.0.1:8000", server.url)
            answer: dict[str, Any] = json.loads(subprocess.check_output(["bash", "-c", address]))
            assert "error" not in answer, answer
            return answer

        def text() -> str:
            status, answer, _ = server.post("/v1/completions", BODY)
            assert status == 200, answer
            return str(answer["choices"][0]["text"])

        def streamed() -> str:
            chunks = server.client.completions.create(
                model="m", stream=True, prompt=PROMPT, max_tokens=400, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

        def weights() -> dict[str, Any]:
            found: dict[str, Any] = server.get_json("/v1/models")["data"][0]["weights"]
            return found

        first, first_weights = text(), weights()
        with ThreadPoolExecutor(4) as pool:

            def stopped_streams() -> tuple[list[int], list[Any]]:
                """The engine cores, which stand still, and streams that began in them."""
                streams = [pool.submit(streamed) for _ in range(4)]
                server.wait_for(lambda: server.metric("llmstack:num_requests_running"), "a stream")
                pids = server.engine_pids()
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                return pids, streams

            # Settings of the same weights: streams move, and their texts are the same.
            _, streams = stopped_streams()
            moved = reload(to_larger)
            assert moved["num_moved_requests"]
            assert [stream.result() for stream in streams] == [first] * 4
            assert moved["weights"]["numeric_contract_id"] == first_weights["numeric_contract_id"]
            # Other weights: those that run end with the old ones.
            server.wait_for(lambda: len(server.engine_pids()) == num_engines, "the engine cores of now")
            pids, streams = stopped_streams()
            answer = reload(to_next)
            other = text()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            texts = [stream.result() for stream in streams]
            assert texts.count(first) == answer["num_finishing_requests"] > 0
            assert set(texts) <= {first, other}
        assert other != first
        assert weights() == answer["weights"]
        assert answer["weights"]["digest"] != first_weights["digest"]
        server.wait_for(lambda: len(server.engine_pids()) == num_engines, "the engine cores of now")
        status, refused, _ = server.post("/v1/reload", {"name": "start", "running": "move"})
        assert (status, refused["error"]["code"]) == (409, "reload_failed")
        assert "numeric contract" in refused["error"]["message"]
        server.wait_for(lambda: len(server.engine_pids()) == num_engines, "the engine cores of now")
        assert server.post("/v1/reload", {"name": "start"})[0] == 200
        assert (text(), weights()) == (first, first_weights)
