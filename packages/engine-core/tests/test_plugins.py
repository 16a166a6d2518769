"""Runners of our own are let read a model's files before their process can."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llmstack_engine_core import plugins
from llmstack_types import ModelRunnerConfig


def test_only_runners_that_read_model_files_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ModelRunnerConfig] = []
    monkeypatch.setitem(sys.modules, "llmstack_model_runner.read_ahead", SimpleNamespace(start_reading=read.append))
    config = ModelRunnerConfig("model")
    for runner in ("default", "parallel", "echo", "package:Runner"):
        plugins.read_ahead(runner, config)
    assert read == [config, config]


def test_a_runner_that_is_not_installed_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmstack_model_runner.read_ahead", None)
    plugins.read_ahead("default", ModelRunnerConfig("model"))
    assert sys.modules["llmstack_model_runner.read_ahead"] is None
