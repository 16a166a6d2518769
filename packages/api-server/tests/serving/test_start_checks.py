"""Files that an operator names are checked before anything listens, by a start and by a dry run alike."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from llmstack_llm.testing import write_model_folder
from llmstack_server.commands import ServeCommand
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.start_checks import check_named_files
from llmstack_server.testing.adapters import write_adapter


def parsed(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServeCommand().add_arguments(parser)
    return parser.parse_args(line)


def problems_of_both(*line: str) -> tuple[list[str], list[str]]:
    """The reasons of a dry run, and those of a start."""
    start, command = parsed(*line), ServeCommand()
    assert command.problems(start) == []
    with pytest.raises(ServeError) as caught:
        check_named_files(getattr(start, "checked options"))
    assert caught.value.exit_code == 2
    return command.problems(parsed(*line, "--dry-run")), str(caught.value).splitlines()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    return str(write_model_folder(tmp_path / "model"))


def test_a_folder_without_weights_is_no_model(model: str):
    for found in problems_of_both(model):
        assert found == ["model has no safetensors weights (--load-format dummy needs none)."]


def test_adapters_that_are_not_there_are_named(model: str, tmp_path: Path):
    write_adapter(tmp_path / "good")
    (write_adapter(tmp_path / "bad") / "adapter_config.json").write_text("[]")
    modules = ("--enable-lora", "--lora-modules", *(f"{name}={tmp_path / name}" for name in ("good", "bad", "absent")))
    for found in problems_of_both(model, "--load-format", "dummy", *modules):
        assert found == [
            "--lora-modules bad: adapter_config.json does not hold a JSON object.",
            "--lora-modules absent: absent is no folder of an adapter.",
        ]


def test_models_and_adapters_of_reloads_are_checked_like_those_of_the_start(model: str, tmp_path: Path):
    entries = [
        "next=org/model",
        f"same={model}",
        "gone=/nowhere/model",
        json.dumps({"name": "adapted", "lora_modules": {"style": str(tmp_path / "absent")}}),
    ]
    line = (model, "--load-format", "dummy", "--enable-lora", "--enable-control-routes", "--reload-models", *entries)
    for found in problems_of_both(*line):
        assert found == [
            "--reload-models gone: There is no folder /nowhere/model.",
            "--reload-models adapted: absent is no folder of an adapter.",
        ]


@pytest.mark.parametrize("name", ["org/model", "gpt2"])
def test_what_the_hub_has_is_not_looked_for(name: str):
    check_named_files(_config(name))


def test_a_configuration_that_is_nested_too_deeply_is_a_reason_of_a_dry_run(model: str):
    depth = 200_000
    (Path(model) / "config.json").write_text(f'{{"a": {"[" * depth}{"]" * depth}}}')
    assert ServeCommand().problems(parsed(model, "--dry-run")) == ["config.json is nested too deeply."]


def _config(*line: str) -> object:
    namespace = parsed(*line)
    assert ServeCommand().problems(namespace) == []
    return getattr(namespace, "checked options")
