"""A model of a quantized checkpoint computes what transformers computes with the weights that the checkpoint means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.quantized_layers import CASES, Draws
from safetensors.torch import load_file, save_file

from llmstack_kernels.grouped_linear import PackedExperts, join_experts
from llmstack_kernels.linear import INT8_DYNAMIC, StoredWeight, computes_stored, pack_stored_linear
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.layers import experts as experts_layer
from llmstack_model_runner.layers import packing
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
TOLERANCE = 2e-5
LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
IN_FULL_PRECISION = "model.layers.0.self_attn.k_proj"  # beside quantized queries and values


def make_reference(config: dict[str, Any], architecture: str = "Llama") -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{architecture}Config")(**config)
    return getattr(transformers, f"{architecture}ForCausalLM")(made).eval()


def write_checkpoint(folder: Path, reference: Any, case: str) -> dict[str, Any]:
    """Quantizes the layers of `reference` at random, writes them, and gives it the weights that they stand for."""
    quantization, make = CASES[case]
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for seed, (name, module) in enumerate(reference.named_modules()):
        is_linear = isinstance(module, torch.nn.Linear) and name not in (IN_FULL_PRECISION, "lm_head")
        if not is_linear or name.endswith("mlp.gate"):  # the router of experts
            continue
        made, weight = make(Draws(module.out_features, module.in_features, seed))
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in made.items()}
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight))  # in float64 until here
    save_file(tensors, folder / "model.safetensors")
    config = reference.config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def load(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32, name: str = "Llama") -> Any:
    model = load_model_class(f"{name}ForCausalLM")(config, dtype, torch.device("cpu"))
    load_weights(model, folder, checkpoint_format=read_format(config))
    return model


# Read by the code of other cases, and in the full run compared with transformers too.
ALIKE = {"fp8 of modelopt", "fp8 of modelopt per channel", "fp8 of modelopt by block, as others write it",
         "auto-round 4 as gptq", "compressed fp8, naive", "gptq 8, asymmetric", "compressed w8a16, asymmetric", "nf4",
         "fp4", "compressed fp8", "compressed fp8 by block"}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case in ALIKE else ()) for case in CASES]
)
def test_logits_equal_transformers_with_the_weights_that_are_meant(case: str, tmp_path: Path) -> None:
    reference = make_reference(LLAMA)
    config = write_checkpoint(tmp_path, reference, case)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    found = PagedHarness(load(tmp_path, config), torch.float32).step([("a", PROMPT)])
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        "gptq 4 with an order",
        pytest.param("compressed w8a8", marks=pytest.mark.full),
        pytest.param("fp8 by block, dynamic", marks=pytest.mark.full),
        pytest.param("nf4", marks=pytest.mark.full),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if not computes_stored(torch.float32, "cpu", "int4"):
        pytest.skip("the native kernels are not built")
    config = write_checkpoint(tmp_path, make_reference(LLAMA), case)
    harness = PagedHarness(load(tmp_path, config, dtype), dtype)
    whole = harness.step([("a", PROMPT), ("b", PROMPT[5:])])
    parts = [harness.step([("c", PROMPT[:7])]), harness.step([("c", PROMPT[7:8])])]
    assert torch.equal(torch.cat(parts), whole[:8])


def test_inputs_are_rounded_on_request_and_layers_in_full_precision_stay_so(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, make_reference(LLAMA), "compressed w8a8")
    exact = PagedHarness(load(tmp_path, config), torch.float32).step([("a", PROMPT)])
    model = load_model_class("LlamaForCausalLM")(config, torch.float32, torch.device("cpu"))
    load_weights(model, tmp_path, quantization=INT8_DYNAMIC, checkpoint_format=read_format(config))
    found = PagedHarness(model, torch.float32).step([("a", PROMPT)])  # type: ignore[arg-type]  # a decoder
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.05
    row = torch.randn(1, 128)
    head = model.compute_logits(row)  # type: ignore[attr-defined]
    expected = torch.nn.functional.linear(row, load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    torch.testing.assert_close(head, expected, rtol=1e-5, atol=1e-5)


def pack_each(weights: Sequence[StoredWeight], dtype: torch.dtype, _: torch.device) -> PackedExperts:
    return join_experts([pack_stored_linear(weight, dtype) for weight in weights])


@pytest.mark.parametrize("in_one_tensor", ["", "packed", "widened"])
def test_experts_of_a_quantized_checkpoint_equal_transformers(
    in_one_tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_one_tensor:  # as on a GPU
        pack = pack_each if in_one_tensor == "packed" else lambda *_: None
        for module in (experts_layer, packing):
            monkeypatch.setattr(module, "are_one_tensor", lambda _: True)
        monkeypatch.setattr(packing, "pack_stored_experts", pack)
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    reference = make_reference(LLAMA | experts, "Mixtral")
    config, tensors = reference.config.to_dict(), {}
    quantization, make = CASES["awq"]
    for name, tensor in reference.state_dict().items():
        if ".mlp.experts." not in name:
            tensors[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor.clone()
            continue
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[name.rpartition(".")[2]]
        for expert, joined in enumerate(tensor):
            for seed, (part, weight) in enumerate(zip(parts, joined.chunk(len(parts)), strict=True)):
                made, meant = make(Draws(weight.shape[0], weight.shape[1], 10 * expert + seed))
                weight.copy_(torch.from_numpy(meant))
                own = f"model.layers.0.block_sparse_moe.experts.{expert}.{part}"
                tensors |= {f"{own}.{suffix}": value for suffix, value in made.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    model = load(tmp_path, config | {"quantization_config": quantization}, name="Mixtral")
    found = PagedHarness(model, torch.float32).step([("a", PROMPT)])
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_a_quantized_head_is_read_and_a_quantized_table_of_tokens_is_refused(tmp_path: Path) -> None:
    reference = make_reference(LLAMA | {"vocab_size": 96})
    quantization, make = CASES["gptq 4"]
    config = reference.config.to_dict() | {"quantization_config": quantization}
    made, meant = make(Draws(96, 128, 0))
    for name in ("lm_head", "model.embed_tokens"):
        tensors = {key: tensor.clone() for key, tensor in reference.state_dict().items() if key != f"{name}.weight"}
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in made.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        if name == "lm_head":
            reference.lm_head.weight.data.copy_(torch.from_numpy(meant))
            with torch.no_grad():
                expected = reference(torch.tensor([PROMPT])).logits[0]
            found = PagedHarness(load(tmp_path, config), torch.float32).step([("a", PROMPT)])
            assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
        else:
            with pytest.raises(ValueError, match=r"embed_tokens.weight is quantized, and only supported in full"):
                load(tmp_path, config)


def test_a_layer_of_another_shape_is_named(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, make_reference(LLAMA), "compressed w8a8")
    with pytest.raises(
        ValueError, match=r"of a wrong shape: .*mlp.down_proj.weight \[128, 192\] instead of \[128, 64\]"
    ):
        load(tmp_path, config | {"intermediate_size": 64})
