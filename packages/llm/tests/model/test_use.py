"""What runner, task and convert offer of a model, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import LLM, AsyncLLM, EngineArgs
from llmstack_llm.engine_args import EngineArgsError
from llmstack_llm.model.config import load_model_config
from llmstack_llm.model.use import ModelUse
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import EngineReady, EngineStartError, InvalidRequestError, PoolingParams

DECODER = EngineReady(64, 16, 128, 257, "float32", "cpu", embedding_size=4)
ENCODER = EngineReady(64, 16, 128, 257, "float32", "cpu", embedding_size=4, is_generative=False)
CLASSIFIER = EngineReady(64, 16, 128, 257, "float32", "cpu", embedding_size=4, is_generative=False, num_labels=2)
ECHO: dict[str, Any] = {"num_kv_blocks": 64}


@pytest.mark.parametrize(
    ("options", "ready", "is_generative", "embedding_size", "num_labels"),
    [
        ({}, DECODER, True, 4, 0),
        ({"runner": "llmstack_engine_core.testing:EchoModelRunner"}, DECODER, True, 4, 0),
        ({"runner": "generate"}, DECODER, True, 0, 0),
        ({"task": "generate"}, DECODER, True, 0, 0),
        ({"runner": "pooling"}, DECODER, False, 4, 0),
        ({"task": "embed"}, DECODER, False, 4, 0),
        ({"convert": "none"}, DECODER, True, 0, 0),
        ({"convert": "embed"}, DECODER, True, 4, 0),
        ({"convert": "none"}, ENCODER, False, 4, 0),
        ({}, CLASSIFIER, False, 4, 2),
        ({"runner": "pooling", "task": "classify", "convert": "classify"}, CLASSIFIER, False, 4, 2),
    ],
)
def test_what_is_offered_is_what_the_model_can_and_the_options_allow(
    options: dict[str, str], ready: EngineReady, is_generative: bool, embedding_size: int, num_labels: int
) -> None:
    restricted = ModelUse.from_options(**options).restrict(ready)
    assert restricted.is_generative is is_generative
    assert (restricted.embedding_size, restricted.num_labels) == (embedding_size, num_labels)


@pytest.mark.parametrize(
    ("options", "ready", "text"),
    [
        ({"runner": "generate"}, ENCODER, "only pools, which"),
        ({"runner": "pooling", "convert": "none"}, DECODER, "generates, which"),
        ({"task": "classify"}, ENCODER, "no labels"),
        ({"task": "score"}, DECODER, "no labels"),
        ({"convert": "classify"}, DECODER, "no labels"),
    ],
)
def test_a_use_that_the_model_is_not_made_for_ends_the_start(
    options: dict[str, str], ready: EngineReady, text: str
) -> None:
    with pytest.raises(EngineStartError, match=text):
        ModelUse.from_options(**options).restrict(ready)


@pytest.mark.parametrize(
    "options",
    [
        {"task": "mystery"}, {"convert": "reward"}, {"runner": "generate", "task": "embed"},
        {"runner": "pooling", "task": "generate"},
    ],
)  # fmt: skip
def test_options_that_say_nothing_sensible_are_refused(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(EngineArgsError, match=next(iter(options))):
        EngineArgs(str(tmp_path), **options)  # type: ignore[arg-type]


def test_offline_work_is_restricted_too(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    runner = {"runner": "llmstack_engine_core.testing:EchoModelRunner"}
    with LLM(str(folder), task="embed", **runner, **ECHO) as llm:
        assert len(llm.embed("a", use_tqdm=False)) == 1
        with pytest.raises(InvalidRequestError, match="does not support Completions API"):
            llm.generate("a", use_tqdm=False)
    with pytest.raises(EngineStartError, match="no labels"):
        LLM(str(folder), task="classify", **runner, **ECHO)


async def test_a_server_learns_which_tasks_are_offered(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    model_config = load_model_config(str(folder), use=ModelUse.from_options(runner="generate"))
    engine = AsyncLLM(model_config, FakeEngineCoreClient(DECODER), load_tokenizer(folder))
    assert (await engine.wait_until_ready()).embedding_size == 0
    with pytest.raises(InvalidRequestError, match="does not support Embeddings API"):
        await engine.admit_pooling("a", PoolingParams())
    await engine.shutdown()
