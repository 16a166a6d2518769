"""A request that a device has no memory for ends with an error of its own; the server and all other requests go on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

MAGIC = [7, 7, 7]
RUNNERS = '''
"""Runners whose device has no memory for rows with three sevens one after the other, and takes its time."""

import time

import torch

from model_runner_helpers.cpu_stand_in import StandInModelRunner
from llmstack_model_runner.model_runner import ModelRunner


def fails(token_ids):
    return "7, 7, 7" in str(token_ids.tolist())


class Faulty:
    def load_model(self):
        super().load_model()
        forward = self._model.forward

        def wrapped(token_ids, *arguments):
            time.sleep(0.01)  # so that streams still run when the test looks
            if fails(token_ids):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return forward(token_ids, *arguments)

        self._model.forward = wrapped


class FaultyHost(Faulty, ModelRunner):
    pass


class FaultyStandIn(Faulty, StandInModelRunner):
    pass
'''
BODY = {"model": "llmstack-demo", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("runner", "arguments"),
    [
        pytest.param("FaultyHost", [], marks=pytest.mark.full),
        pytest.param("FaultyHost", ["--async-scheduling"], marks=pytest.mark.full),
        ("FaultyStandIn", ["--async-scheduling"]),
    ],
)
def test_one_request_dies_with_500_while_streams_go_on(
    serve: Callable[..., Any], tmp_path: Path, runner: str, arguments: list[str]
) -> None:
    (tmp_path / "faulty_runners.py").write_text(RUNNERS, encoding="utf-8")
    flags = ["--runner", f"faulty_runners:{runner}", "--enforce-eager", *arguments]
    with serve(*flags, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}) as server:
        prompts = [[300, 301, 302], [40] * 50, [90, 91]]
        expected = [server.post("/v1/completions", {**BODY, "prompt": prompt})[1] for prompt in prompts]
        streams = [start_stream(server.client, prompt) for prompt in prompts]
        texts = [next(stream).choices[0].text for stream in streams]
        status, answer, headers = server.post("/v1/completions", {**BODY, "prompt": [500, *MAGIC, 501]})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (
            500, "server_error", "request_quarantined",
        )  # fmt: skip
        assert "memory" in answer["error"]["message"]
        assert headers["x-should-retry"] == "false"
        for index, stream in enumerate(streams):
            texts[index] += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert texts == [answer["choices"][0]["text"] for answer in expected]
        # No request finds what the failed request was to write, and its blocks are free again.
        status, again, _ = server.post("/v1/completions", {**BODY, "prompt": prompts[0]})
        assert (status, again["choices"][0]["text"]) == (200, texts[0])
        assert server.get_status("/health") == 200
        server.wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0.0, "free KV cache", timeout_s=10)
        assert re.search(r"gave up 1 rows", server.log)


def start_stream(client: Any, prompt: list[int]) -> Any:
    body = {name: value for name, value in BODY.items() if name != "ignore_eos"}
    return client.completions.create(**body, prompt=prompt, stream=True, extra_body={"ignore_eos": True})
