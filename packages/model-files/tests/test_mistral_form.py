"""Models in Mistral's own form: which files are read, and what their configuration means."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_files import (
    FileForm,
    ModelFilesError,
    has_own_names,
    read_model_config,
    resolve_model,
    safetensors_files,
)
from llmstack_model_files.mistral_params import config_of_params
from llmstack_model_files.resolve import _second_copy

PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 4, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": 99,
    "rope_theta": 1e6, "max_seq_len": 512,
}  # fmt: skip
YARN = {"factor": 16.0, "original_max_position_embeddings": 16, "beta": 32.0, "alpha": 1.0}

GROWTH = {"original_max_position_embeddings": 16, "beta": 0.1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_weights(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for name in names:
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def write_both(folder: Path) -> Path:
    write_weights(folder, "model.safetensors", "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (folder / "tekken.json").write_text("{}")
    return folder


def test_of_two_forms_the_hubs_is_read_unless_another_is_asked_for(tmp_path: Path) -> None:
    folder = write_both(tmp_path / "model")
    assert resolve_model(str(folder)) == folder
    for form, architecture, is_own in (
        (FileForm("mistral", "mistral"), "MistralForCausalLM", True),
        (FileForm("mistral"), "MistralForCausalLM", False),
        (FileForm("auto", "mistral"), "LlamaForCausalLM", True),
    ):
        found = resolve_model(str(folder), form=form)
        assert found != folder
        assert read_model_config(found, {})["architectures"] == [architecture]
        name = "consolidated.safetensors" if is_own else "model.safetensors"
        assert safetensors_files(found) == [folder / name]
        assert has_own_names(found) == is_own
        assert (found / "tekken.json").read_text() == "{}"
        assert resolve_model(str(found), form=form) == found  # as a server passes it on


def test_a_repository_in_one_form_is_read_in_it(tmp_path: Path) -> None:
    write_weights(
        tmp_path / "model", "consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"
    )
    (tmp_path / "model/params.json").write_text(json.dumps(PARAMS))
    found = resolve_model(str(tmp_path / "model"))
    assert [path.name for path in safetensors_files(found)] == [
        "consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"
    ]  # fmt: skip
    assert resolve_model(str(tmp_path / "model")) == found
    (tmp_path / "model/params.json").write_text(json.dumps(PARAMS | {"vocab_size": 100}))
    changed = resolve_model(str(tmp_path / "model"))
    assert changed != found
    assert read_model_config(changed, {})["vocab_size"] == 100


def test_links_of_another_folder_are_not_followed(tmp_path: Path) -> None:
    write_weights(tmp_path / "elsewhere", "consolidated.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "consolidated.safetensors").symlink_to(tmp_path / "elsewhere/consolidated.safetensors")
    with pytest.raises(ModelFilesError, match="is a link that leads out of the model folder"):
        resolve_model(str(folder))


def test_the_files_beside_the_weights_are_bounded_together(tmp_path: Path) -> None:
    folder = write_both(tmp_path / "model")
    for number in range(5):
        with (folder / f"more-{number}.json").open("wb") as file:
            file.truncate(60 << 20)
    with pytest.raises(ModelFilesError, match="the files beside the weights have over 256 MiB"):
        resolve_model(str(folder), form=FileForm("mistral"))


def test_what_is_downloaded_is_one_copy_of_the_weights() -> None:
    both = ["model-00001-of-00002.safetensors", "consolidated.safetensors", "params.json"]
    assert _second_copy(both, FileForm()) == ["consolidated*"]
    assert _second_copy(both, FileForm("mistral", "mistral")) == ["model*.safetensors"]
    assert _second_copy(["consolidated.safetensors", "params.json"], FileForm()) == []


def test_a_dense_model(tmp_path: Path) -> None:
    assert config_of_params(PARAMS | {"tied_embeddings": True, "dtype": "bfloat16"}) == {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "vocab_size": 99, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip


def test_windows_in_a_pattern_are_those_of_the_layers() -> None:
    config = config_of_params(PARAMS | {"sliding_window": [None, 128]})
    assert config["architectures"] == ["MinistralForCausalLM"]
    assert config["sliding_window"] == 128
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2


def test_queries_that_grow_make_a_ministral_3() -> None:
    config = config_of_params(PARAMS | {"yarn": YARN | {"apply_scale": False}, "llama_4_scaling": GROWTH})
    assert config["architectures"] == ["Ministral3ForCausalLM"]
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip


def test_pictures_without_merged_patches_are_pixtrals() -> None:
    vision = {"hidden_size": 32, "image_size": 56, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 40, "adapter_bias": True, "image_token_id": 10}  # fmt: skip
    config = config_of_params(PARAMS | {"vision_encoder": vision})
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["text_config"]["architectures"] == ["MistralForCausalLM"]
    assert config["vision_config"]["model_type"] == "pixtral"
    assert config["multimodal_projector_bias"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dim": None, "gate": 3}, "the field gate is not known, and it may change answers"),
        ({"activation": "relu"}, "activation relu is not supported"),
        ({"model_type": "mamba"}, "model_type mamba is not supported"),
        ({"sliding_window": [1, 2]}, "sliding_window is neither a number nor a pattern"),
        ({"sliding_window": [8, None, 8]}, "sliding_window is neither a number nor a pattern"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling without yarn"),
        ({"yarn": YARN | {"gamma": 1}}, "the field yarn.gamma is not known"),
        ({"yarn": YARN, "llama_4_scaling": {"beta": 1, "original_max_position_embeddings": 8}}, "different positions"),
        ({"moe": {"num_shared_experts": 1}}, "shared experts without latent attention"),
        ({"moe": {"num_experts": 4, "routed_scale": 2.0}}, "moe.routed_scale 2.0 is not supported; 1.0 is"),
        ({"moe": {"num_experts": 4, "noise": 1}}, "the field moe.noise is not known"),
        ({"q_lora_rank": 8}, "q_lora_rank without kv_lora_rank"),
        ({"kv_lora_rank": 8, "sliding_window": 8}, "sliding_window with latent attention"),
        ({"sliding_window": [8, None], "yarn": YARN, "llama_4_scaling": GROWTH}, "windows with llama_4_scaling"),
        ({"kv_lora_rank": 8, "moe": {"renorm_strategy": "NONE"}}, "moe.renorm_strategy NONE is not supported"),
        ({"kv_lora_rank": 8, "moe": {"noise": 1}}, "the field moe.noise is not known"),
        ({"quantization": {"qformat_weight": "int3"}}, "quantization .* is not supported"),
        ({"multimodal": {"whisper_model_args": {"encoder_args": {}}}}, "a model of sound is not read"),
        ({"vision_encoder": {"mm_projector_id": "other"}}, "mm_projector_id other is not supported"),
        ({"vision_encoder": {"add_pre_mm_projector_layer_norm": True}}, "come together alone"),
    ],
)
def test_what_may_change_answers_and_is_not_known_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        config_of_params(PARAMS | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dim": "64"}, "dim must be an integer from 1 to 2147483648"),
        ({"n_heads": 0}, "n_heads must be an integer"),
        ({"n_layers": 10**12, "sliding_window": [4, None]}, "n_layers must be an integer from 1 to 4096"),
        ({"n_layers": 2.0}, "n_layers must be an integer"),
        ({"vocab_size": None}, "params.json lacks vocab_size"),
        ({"rope_theta": "x"}, "rope_theta must be a number over 0"),
        ({"norm_eps": float("inf")}, "norm_eps must be a number over 0"),
        ({"tied_embeddings": "false"}, "tied_embeddings must be true or false"),
        ({"moe": [1]}, "moe must be an object"),
        ({"multimodal": [1]}, "multimodal must be an object"),
        ({"multimodal": {"vision_encoder_args": "x"}}, "multimodal.vision_encoder_args must be an object"),
        ({"vision_encoder": "x"}, "vision_encoder must be an object"),
        ({"quantization": "fp8"}, "quantization must be an object"),
        ({"yarn": 5}, "yarn must be an object"),
        ({"yarn": {"factor": "a"}}, "yarn.factor must be a number"),
        ({"yarn": YARN, "llama_4_scaling": {"original_max_position_embeddings": 16}}, "llama_4_scaling.beta must be"),
        ({"sliding_window": True}, "sliding_window is neither"),
        ({"sliding_window": [[1], 2]}, "sliding_window is neither"),
    ],
)
def test_values_of_another_kind_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFilesError, match=reason):
        config_of_params(PARAMS | changes)


def test_missing_sizes_are_named() -> None:
    with pytest.raises(ModelFilesError, match=r"params\.json lacks dim, norm_eps\."):
        config_of_params({name: value for name, value in PARAMS.items() if name not in ("dim", "norm_eps")})
