"""Configurations of files whose layers keep states: kinds by tensors, counts by layer, and what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from llmstack_gguf import GGUFError, Header, TensorInfo, TensorType, target_of
from llmstack_gguf.architecture import model_config
from llmstack_gguf.hybrids import HYBRID_FIELDS

F32 = TensorType("F32", 1, 4)
SIZES: dict[str, Any] = {
    "context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": array("i", [0, 2]), "attention.key_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-5, "ssm.inner_size": 64, "ssm.time_step_rank": 8, "ssm.group_count": 2,
    "ssm.state_size": 16, "ssm.conv_kernel": 4, "shortconv.l_cache": 3, "attention.scale": 0.5,
    "rope.dimension_count": 4,
}  # fmt: skip
SHAPES = {
    "blk.0.ssm_in.weight": (168, 32), "blk.0.shortconv.conv.weight": (32, 3), "blk.0.ssm_out.weight": (32, 64),
    "blk.1.attn_q.weight": (32, 32),
}  # fmt: skip


def header(architecture: str, **changes: Any) -> Header:
    metadata = {f"{architecture}.{name}": value for name, value in SIZES.items()}
    metadata |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in changes.items()}
    tensors = {name: TensorInfo(shape, F32, 0, 0) for name, shape in SHAPES.items()}
    own = {"general.architecture": architecture} | metadata
    return Header(own, {"token_embd.weight": TensorInfo((9, 32), F32, 0, 0)} | tensors)


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("lfm2", ["conv", "full_attention"]),
        ("granitehybrid", ["mamba", "attention"]),
        ("qwen35", ["linear_attention", "full_attention"]),
    ],
)
def test_kinds_of_layers_are_those_of_their_tensors(architecture: str, kinds: list[str]) -> None:
    config = model_config(header(architecture))
    assert config["layer_types"] == kinds
    assert config["num_key_value_heads"] == 2


def test_norms_of_falcon_h1_have_no_kind_in_files() -> None:
    for name in ("blk.1.ffn_norm", "blk.1.ffn_norm.weight"):
        file = header("falcon-h1")
        named = Header(file.metadata, {**file.tensors, name: TensorInfo((32,), F32, 0, 0)})
        assert target_of(named, name).names == ("model.layers.1.pre_ff_layernorm.weight",)


def test_numbers_of_states_are_put_into_the_form_of_repositories() -> None:
    found = header("mamba2")
    forms = {"ssm_a": "log of negative", "ssm_d": "flat", "ssm_norm.weight": "flat", "ssm_conv1d.weight": "taps"}
    for name, form in forms.items():
        found.tensors[f"blk.0.{name}"] = TensorInfo((8, 1), F32, 0, 0)
        assert target_of(found, f"blk.0.{name}").form == form
    assert target_of(found, "blk.0.ssm_a").names == ("model.layers.0.mixer.A_log",)
    assert target_of(found, "blk.0.ssm_in.weight").names == ("model.layers.0.mixer.in_proj.weight",)


@pytest.mark.parametrize("architecture", HYBRID_FIELDS)
def test_a_count_of_layers_is_bounded_before_anything_is_looked_for(architecture: str) -> None:
    with pytest.raises(GGUFError, match="says 1099511627776 layers; 4096 are the most"):
        model_config(header(architecture, block_count=1 << 40))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("granitehybrid", {"rope__scaling__finetuned": True}, "rotation of heads"),
        ("granitehybrid", {"ssm__time_step_rank": 7}, "7 heads cannot share 64"),
        ("qwen35", {"ssm__time_step_rank": 0}, "0 heads cannot share 64"),
        ("lfm2", {"attention__head_count_kv": array("i", [2])}, "no count for each of 2 layers"),
        ("lfm2", {"attention__head_count_kv": array("i", [-1, 2])}, "no count for each of 2 layers"),
        ("lfm2", {"attention__head_count_kv": array("f", [1.5, 2.0])}, "no count for each of 2 layers"),
        ("lfm2", {"attention__head_count_kv": array("f", [float("inf"), 2.0])}, "no count for each of 2 layers"),
        ("qwen2vl", {"attention__head_count_kv": 2, "rope__dimension_count": 8,
                     "rope__dimension_sections": array("f", [float("nan"), 1, 1])}, "has no three axes"),
        ("nemotron_h", {"block_count": 3, "attention__head_count_kv": 2}, "block 2 is of no known kind"),
    ],
)  # fmt: skip
def test_what_makes_no_model_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        model_config(header(architecture, **changes))
