"""Adapters of several models: each is a model of its own to clients, and is loaded with the model that has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from other_weights import write_checkpoints

from llmstack_model_runner.testing import write_random_adapter

TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def complete(server: Any, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    status, answer, _ = server.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]


def listed(server: Any) -> dict[str, tuple[str, str | None]]:
    models = server.get_json("/v1/models")["data"]
    return {model["id"]: (model["status"]["value"], model["parent"]) for model in models}


def post_status(server: Any, path: str, body: dict[str, str]) -> int:
    return httpx.post(server.url + path, json=body, timeout=60).status_code


def test_adapters_are_names_of_their_models(launch: Callable[..., Any], tmp_path: Path):
    write_checkpoints(tmp_path)
    root = tmp_path / "root"
    for number, name in enumerate(("started", "later")):
        write_random_adapter(root / name, tmp_path / "first", TARGETS, number, spread=0.15)
    file = tmp_path / "models.yaml"
    file.write_text(
        "memory: 1100M\nmodels:\n"
        f"  second:\n    model: {tmp_path / 'next'}\n    memory: 500M\n"
        f"  first:\n    model: {tmp_path / 'first'}\n    memory: 500M\n    flags:\n      enable_lora: true\n"
        f"      lora_modules: [started={root / 'started'}]\n      lora_root: {root}\n      max_engine_restarts: 0\n"
    )
    file.chmod(0o600)
    server = launch("--models", str(file), "--enable-control-routes", env={"LLMSTACK_MODEL": ""})
    server.wait_until_ready()
    assert listed(server)["started"] == ("unloaded", "first")
    started = complete(server, "started")
    assert started[0] == 200, server.log
    assert listed(server) == {"second": ("unloaded", None), "first": ("loaded", None), "started": ("loaded", "first")}
    assert started[1] != complete(server, "first")[1]

    def load(name: str, model: str = "first") -> int:
        body = {"lora_name": name, "lora_path": "later"}
        return post_status(server, f"/v1/load_lora_adapter?model={model}", body)

    assert load("later") == 200
    assert (load("second"), load("first"), load("later")) == (400, 400, 400), "names that are taken"
    assert (load("other", "second"), load("other", "none")) == (503, 404)
    later = complete(server, "later")
    assert later[0] == 200
    assert later[1] not in (started[1], complete(server, "first")[1])
    models = {model["name"]: model for model in server.get_json("/server_info")["models"]}
    os.kill(models["first"]["pids"][0], signal.SIGKILL)
    server.wait_for(lambda: listed(server)["first"][0] == "failed", "failure")
    assert listed(server)["later"] == ("failed", "first")
    server.wait_for(lambda: complete(server, "later") == later, "the adapter of the model that is loaded again")
    assert complete(server, "started") == started
    assert post_status(server, "/v1/unload_lora_adapter?model=first", {"lora_name": "later"}) == 200
    assert complete(server, "later") == (404, "model_not_found")
    assert "later" not in listed(server)
    assert server.stop() == 0
