"""The process of several models, at its end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.several_models import serve_config
from llmstack_server.pool.model_pool import ModelPool
from llmstack_server.pool.pooled_model import MemoryPlan
from llmstack_server.serving import models_process
from llmstack_server.serving.event_loop import EarlySignals
from llmstack_server.serving.launcher import StageTimer
from llmstack_server.serving.models_process import ModelsProcess
from llmstack_server.serving.sockets import bind_socket

MODELS = "memory: 2G\nmodels:\n  one: {model: /m/one, memory: 1G}\n  two: {model: /m/two, memory: 1G}\n"


async def test_engines_end_where_something_before_them_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "models.yaml"
    path.write_text(MODELS)
    path.chmod(0o600)
    parser, ended = argparse.ArgumentParser(), list[str]()
    add_serve_arguments(parser)
    config = serve_config(settings_from(parser.parse_args(["--models", str(path)]), {}))
    assert config.models is not None

    async def fail() -> None:
        ended.append("model")
        raise OSError("the disk is gone")

    async def run(server: Any, on_ready: object) -> int:
        for model in server.pool.models:
            model.host.state.at_end.append(fail)
        return 0

    async def shutdown(pool: ModelPool) -> None:
        ended.append("engines")

    monkeypatch.setattr(models_process._ModelsServer, "run", run)
    monkeypatch.setattr(ModelPool, "shutdown", shutdown)
    monkeypatch.setattr(models_process, "freeze_start", lambda: None)
    with bind_socket("127.0.0.1", 0) as listener:
        plans = [MemoryPlan(1, 1, 1)] * 2
        process = ModelsProcess(config, config.models, plans, StageTimer(), listener, EarlySignals())
        assert await process.run() == 0
    assert ended == ["model", "model", "engines"]
