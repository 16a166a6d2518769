"""The example of Ray Serve is run as it stands: load starts a second replica, and answers are streams."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_core_helpers.ports import free_port
from ray_cluster import cluster

import llmstack_demo_model

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or importlib.util.find_spec("grpc_reflection") is None,
        reason="needs ray[serve]",
    ),
]
# In a process of its own: Ray and its loops do not end with a test.
DRIVER = """
import json, os, sys, threading, time
import httpx, ray
from ray import serve
from deploy.ray_serve import app

port = int(sys.argv[1])
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app)
texts = []
is_over = threading.Event()

def load(number):
    body = {"model": "llmstack-demo", "prompt": f"Stream {number}", "max_tokens": 60, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}
    while not is_over.is_set():
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            texts.append((answer.status_code, chunks[-1]["usage"]["completion_tokens"]))

threads = [threading.Thread(target=load, args=(number,), daemon=True) for number in range(6)]
for thread in threads:
    thread.start()
deadline = time.monotonic() + 240
num_running = 0
while num_running < 2 and time.monotonic() < deadline:
    time.sleep(0.5)
    deployment = serve.status().applications["default"].deployments["Replica"]
    num_running = max(num_running, deployment.replica_states.get("RUNNING", 0))
is_over.set()
for thread in threads:
    thread.join(120)
print("replicas:", num_running)
print("streams:", sorted(set(status for status, _ in texts)), set(count for _, count in texts) == {60})
serve.shutdown()
"""


def test_load_starts_a_second_replica(tmp_path: Path) -> None:
    model = tmp_path / "echo?step_delay_s=0.02"
    model.symlink_to(llmstack_demo_model.model_path())
    arguments = f"'{model}' --runner echo --served-model-name llmstack-demo"
    settings = {
        "LLMSTACK_SERVE": arguments, "LLMSTACK_MAX_REPLICAS": "2", "LLMSTACK_TARGET_REQUESTS": "2",
        "LLMSTACK_UPSCALE_DELAY_S": "1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        with cluster(has_token=True, num_cpus=2) as ray:
            result = subprocess.run(
                [sys.executable, "-c", DRIVER, str(free_port())],
                env={**os.environ, **ray.env, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=400,
            )  # fmt: skip
    assert "replicas: 2\nstreams: [200] True\n" in result.stdout, result.stdout[-2000:] + result.stderr[-4000:]
