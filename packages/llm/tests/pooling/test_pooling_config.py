"""What a folder of sentence-transformers or a pooler configuration says of vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.engine_args import EngineArgs, EngineArgsError
from llmstack_llm.model.config import load_model_config
from llmstack_llm.model.pooling_config import PoolingConfig, PoolingConfigError, load_pooling_config
from llmstack_llm.testing import write_model_folder
from llmstack_types import (
    PoolingType,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m")


ST = "sentence_transformers.models."


def write_modules(folder: Path, *kinds: str, mode: str = "pooling_mode_mean_tokens", max_seq_length: int = 32) -> None:
    """The files of sentence-transformers."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"idx": i, "path": paths.get(kind, f"{i}_{kind}"), "type": ST + kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {name: name == mode for name in ("pooling_mode_cls_token", "pooling_mode_mean_tokens", mode)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("pooling_mode_cls_token", PoolingType.CLS),
        ("pooling_mode_mean_tokens", PoolingType.MEAN),
        ("pooling_mode_lasttoken", PoolingType.LAST),
        ("pooling_mode_max_tokens", PoolingType.MAX),
        ("pooling_mode_weightedmean_tokens", PoolingType.WEIGHTED_MEAN),
    ],
)
@pytest.mark.parametrize("has_normalize", [True, False])
def test_a_folder_of_sentence_transformers_is_understood(
    folder: Path, mode: str, kind: PoolingType, has_normalize: bool
) -> None:
    write_modules(folder, "Transformer", "Pooling", *(["Normalize"] if has_normalize else []), mode=mode)
    assert load_pooling_config(folder) == PoolingConfig(kind, has_normalize, 32)
    config = load_model_config(str(folder))
    assert (config.pooling.pooling_type, config.max_model_len) == (kind, 32)
    assert load_model_config(str(folder), max_model_len=100).max_model_len == 100


def test_a_folder_may_say_what_is_put_before_texts(folder: Path) -> None:
    write_modules(folder, "Transformer", "Pooling")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: ", "odd": 5}}')
    assert load_pooling_config(folder).prompts == {"query": "q: "}


def test_any_other_folder_says_nothing(folder: Path) -> None:
    assert load_pooling_config(folder) == PoolingConfig()


def test_a_module_or_mode_that_would_change_the_vectors_is_refused(tmp_path: Path) -> None:
    other, joined = write_model_folder(tmp_path / "a"), write_model_folder(tmp_path / "b")
    write_modules(other, "Transformer", "Pooling", "LayerNorm")
    with pytest.raises(PoolingConfigError, match=r"modules.json: a module of type 'LayerNorm'"):
        load_model_config(str(other))
    write_modules(joined, "Transformer", "Pooling", mode="pooling_mode_mean_sqrt_len_tokens")
    with pytest.raises(PoolingConfigError, match=r"1_Pooling/config.json: .*found pooling_mode_mean_sqrt_len_tokens"):
        load_model_config(str(joined))
    (joined / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    with pytest.raises(PoolingConfigError, match="include_prompt false is not supported"):
        load_model_config(str(joined))


def test_newer_folders_name_the_mode_in_one_field(folder: Path) -> None:
    write_modules(folder, "Transformer", "Pooling")
    (folder / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 8, "pooling_mode": "lasttoken"}')
    assert load_pooling_config(folder).pooling_type is PoolingType.LAST


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (PoolingType.MEAN, False)),
        ({"pooling_type": "CLS"}, (PoolingType.CLS, False)),
        ({"seq_pooling_type": "LAST", "normalize": True}, (PoolingType.LAST, True)),
        ({"use_activation": True}, (PoolingType.MEAN, True)),
    ],
)
def test_a_pooler_config_stands_above_the_folder(
    folder: Path, asked: dict[str, Any], expected: tuple[PoolingType, bool]
) -> None:
    write_modules(folder, "Transformer", "Pooling")
    for value in (asked, json.dumps(asked)):
        config = EngineArgs(str(folder), pooler_config=value).create_engine_config()[0]
        assert (config.pooling.pooling_type, config.pooling.normalize) == expected
        assert config.max_model_len == 32


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"pooling_type": "STEP"}, "pooling_type 'STEP' is none of cls, mean, last"),
        ({"normalize": 1}, "normalize must be true or false"),
        ({"step_tag_id": 5}, "no 'step_tag_id'"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_pooler_config_that_says_anything_else_is_refused(folder: Path, asked: Any, text: str) -> None:
    with pytest.raises((PoolingConfigError, EngineArgsError), match=text):
        EngineArgs(str(folder), pooler_config=asked).create_engine_config()


@pytest.mark.parametrize(("config", "expected"), [({"pad_token_id": 1}, 512), ({}, 512), ({"pad_token_id": 0}, 513)])
def test_robertas_positions_begin_behind_the_paddings(folder: Path, config: dict[str, Any], expected: int) -> None:
    positions = {"model_type": "roberta", "n_positions": None, "max_position_embeddings": 514}
    write_model_folder(folder, config=positions | config)
    assert load_model_config(str(folder)).max_model_len == expected
