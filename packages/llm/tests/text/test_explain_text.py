"""`llmstack explain --explain-text` decodes with the tokenizer in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_insight.commands.explain import ExplainCommand
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

WORDS = ["zero", "you", "are", "a", "kind", "strict", "helper", "teacher", "now", "then"]
LIMITS = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 32}


def explain(*arguments: str) -> int:
    command, parser = ExplainCommand(), argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Two prompts of one key that part at token 3."""
    path = tmp_path / "steps.log"
    config = EngineConfig(
        ModelRunnerConfig("echo", block_size=2, **LIMITS), runner="echo", scheduler=SchedulerConfig(**LIMITS),
        num_blocks=16, record_steps=str(path),
    )  # fmt: skip
    core = build_engine_core(config)
    for name, token_ids in (("before", [1, 2, 3, 4, 6, 8]), ("r", [1, 2, 3, 5, 7, 9])):
        core.add_request(EngineCoreRequest(name, token_ids, SamplingParams(max_tokens=2, ignore_eos=True)))
        while core.has_unfinished_requests():
            core.step()
    core.shutdown()
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = tmp_path / "model"
    made.mkdir()
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="zero"))
    backend.save(str(made / "tokenizer.json"))
    return str(made)


def test_the_words_where_prompts_part_are_shown_on_request(
    log: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain("r", "--log", log) == 0
    assert "strict" not in capsys.readouterr().out
    assert explain("r", "--log", log, "--explain-text", folder) == 0
    expected = "After 'you are a' it has token 5, 'strict', and before has token 4, 'kind'."
    assert expected in capsys.readouterr().out


def test_a_folder_without_a_tokenizer_is_one_sentence(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain("r", "--log", log, "--explain-text", str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.startswith("llmstack explain: error: --explain-text: ")
    assert error.count("\n") == 1


def test_a_running_server_is_not_asked_for_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("r", "--explain-text", folder) == 1
    assert "--explain-text needs --log" in capsys.readouterr().err
