"""Experts of gpt-oss in MXFP4 compute with the weights that the checkpoint means, and are kept as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.quantized_layers import E2M1
from safetensors.torch import load_file, save_file

from llmstack_kernels.grouped_linear import PackedExperts, join_experts
from llmstack_kernels.linear import StoredWeight, pack_stored_linear
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.checkpoint_formats.read import read_quantized
from llmstack_model_runner.layers import packing, stacked_experts
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.weights import load_weights

CPU = torch.device("cpu")
NUM_EXPERTS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
PROJECTION = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder in MXFP4, and the tensors in full precision that it means, from float64."""
    folder = tmp_path_factory.mktemp("mxfp4")
    (folder / "config.json").write_text(json.dumps(CONFIG | MXFP4))
    draws, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    given: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, slot in make_model().slots().items():
        if slot.load_stored is None or ".experts." not in name:
            given[name] = meant[name] = torch.randn(slot.shape, generator=generator) * 0.3
            continue
        _, num_inputs, num_outputs = slot.shape
        numbers = draws.integers(0, 16, (NUM_EXPERTS, num_outputs, num_inputs // 32, 32), dtype=np.uint8)
        exponents = draws.integers(121, 126, (NUM_EXPERTS, num_outputs, num_inputs // 32), dtype=np.uint8)
        weights = E2M1[numbers].astype(np.float64) * 2.0 ** (exponents[..., None].astype(np.float64) - 127)
        meant[name] = torch.from_numpy(weights).flatten(2).transpose(1, 2).float()
        given[f"{name}_blocks"] = torch.from_numpy(numbers[..., ::2] | (numbers[..., 1::2] << 4))
        given[f"{name}_scales"] = torch.from_numpy(exponents)
    save_file(given, folder / "model.safetensors")
    return folder, meant


def make_model(dtype: torch.dtype = torch.float32) -> CausalLM:
    model = load_model_class("GptOssForCausalLM")(CONFIG, dtype, CPU)
    assert isinstance(model, CausalLM)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = make_model(dtype)
    load_weights(model, folder, checkpoint_format=read_format(CONFIG | MXFP4))
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)], ids=str)
def test_logits_are_those_of_the_weights_that_are_meant(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype, tolerance: float
) -> None:
    folder, meant = checkpoint
    plain = make_model()
    plain.load_weights(meant.items())
    plain.finish_loading()
    expected = PagedHarness(plain, torch.float32).step([("a", PROMPT)])
    found = PagedHarness(load(folder, dtype), dtype).step([("a", PROMPT)])
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_no_expert_is_widened_on_a_cpu(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("experts were widened")

    monkeypatch.setattr(stacked_experts, "pack_experts", refuse)
    load(checkpoint[0])


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_in_one_tensor_keep_their_format_or_are_widened(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = PagedHarness(load(checkpoint[0]), torch.float32).step([("a", PROMPT)])
    layouts: list[str] = []

    def pack(weights: list[StoredWeight], dtype: torch.dtype, _: torch.device) -> PackedExperts | None:
        layouts.extend(weight.layout for weight in weights)
        return join_experts([pack_stored_linear(weight, dtype) for weight in weights]) if is_packed else None

    monkeypatch.setattr(packing, "are_one_tensor", lambda _: True)
    monkeypatch.setattr(packing, "pack_stored_experts", pack)
    found = PagedHarness(load(checkpoint[0]), torch.float32).step([("a", PROMPT)])
    assert layouts == ["table4"] * 2 * NUM_EXPERTS
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def damage(tensors: dict[str, torch.Tensor], suffix: str, change: Any) -> dict[str, torch.Tensor]:
    name = PROJECTION + suffix
    return tensors | {name: change(tensors[name].clone())}


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_scales", lambda scales: scales.index_fill_(2, torch.tensor([0]), 255), "a scale is NaN"),
        ("_scales", lambda scales: scales[:, :-1], "the scales have the shape"),
        ("_blocks", lambda blocks: blocks[0, 0], "a matrix or one per expert is needed"),
        ("_blocks", lambda blocks: blocks[:0], "a matrix or one per expert is needed"),
    ],
)
def test_damaged_experts_are_refused_by_name(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], suffix: str, change: Any, message: str
) -> None:
    tensors = damage(load_file(checkpoint[0] / "model.safetensors"), suffix, change)
    found = read_format(CONFIG | MXFP4)
    assert found is not None
    with pytest.raises(ValueError, match=rf"experts\.down_proj cannot be read as MXFP4: .*{message}"):
        make_model().load_weights(read_quantized(found, [*tensors], tensors.__getitem__))


def test_experts_of_another_number_are_refused(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    for suffix in ("_blocks", "_scales"):
        tensors = damage(tensors, suffix, lambda tensor: tensor[:2])
    found = read_format(CONFIG | MXFP4)
    assert found is not None
    read = list(read_quantized(found, [*tensors], tensors.__getitem__))
    assert sum(isinstance(tensor, UnreadWeight) for _, tensor in read) == 2
    with pytest.raises(ValueError, match=r"of a wrong shape: .*experts\.down_proj"):
        make_model().load_weights(read)
