"""Defaults of configurations: absent fields get them, null and given ones do not."""

from __future__ import annotations

import json
from pathlib import Path

from llmstack_model_files import read_model_config
from llmstack_model_files.config_defaults import DEFAULTS, with_defaults


def test_absent_fields_are_filled_in_and_given_ones_kept() -> None:
    found = with_defaults({"model_type": "mistral", "hidden_size": 64, "sliding_window": None})
    assert (found["hidden_size"], found["sliding_window"]) == (64, None)
    assert (found["num_key_value_heads"], found["max_position_embeddings"]) == (8, 131_072)


def test_configurations_of_unknown_types_are_as_they_were() -> None:
    assert with_defaults({"model_type": "other", "hidden_size": 64}) == {"model_type": "other", "hidden_size": 64}
    assert with_defaults({}) == {}


def test_a_field_under_an_older_name_counts_as_given() -> None:
    found = with_defaults({"model_type": "falcon", "n_embed": 64})
    assert "hidden_size" not in found
    assert found["vocab_size"] == DEFAULTS["falcon"]["vocab_size"]


def test_the_configuration_of_a_folder_is_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "head_dim": 64}))
    found = read_model_config(tmp_path, {"num_hidden_layers": 3})
    assert (found["num_hidden_layers"], found["num_key_value_heads"], found["head_dim"]) == (3, 4, 64)
