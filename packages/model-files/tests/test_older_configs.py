"""Fields of models that had code of their own get the names of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_files import ModelFilesError, read_model_config

NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False,
    "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "n_embd": 768, "n_head": 12,
    "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "type_vocab_size": 2,
    "vocab_size": 30528,
}  # fmt: skip


def read(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(NOMIC | changes))
    return read_model_config(folder, {})


def test_the_fields_of_nomic_are_those_of_its_class(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found["hidden_size"] == 768
    assert found["num_hidden_layers"] == 12
    assert found["intermediate_size"] == 3072
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}
    assert found["max_position_embeddings"] == 2048  # its own code turns longer prompts in another way
    assert "n_positions" not in found
    assert found["vocab_size"] == 30528


def test_what_the_class_does_not_compute_is_refused(tmp_path: Path) -> None:
    for name, value in {"prenorm": True, "moe_every_n_layers": 2, "activation_function": "gelu"}.items():
        with pytest.raises(ModelFilesError, match=f"{name} .* is not supported for nomic_bert"):
            read(tmp_path, **{name: value})


def test_a_configuration_of_the_class_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nomic_bert", "hidden_size": 8}))
    assert read_model_config(tmp_path, {})["hidden_size"] == 8


def test_a_name_of_vllm_is_that_of_the_class_that_computes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ModernBertModel"]}))
    overrides = {"architectures": ["ColBERTModernBertModel"]}
    assert read_model_config(tmp_path, overrides)["architectures"] == ["ModernBertModel"]
