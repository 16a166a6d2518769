"""Weights are read from checked files or made up, and whatever does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from safetensors.torch import save_file

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.models import CausalLM, load_model_class
from llmstack_model_runner.weights import load_weights, resolve_dtype
from llmstack_types.vocabulary import DTYPE_ALIASES, DType, words_of

GPT2: dict[str, Any] = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 50, "n_positions": 32}
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 50,
}
PROMPT = [1, 2, 3, 5, 8, 13]


def make(architecture: str, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model_class(architecture)(config, dtype, torch.device("cpu"))


def made_up_tensors(model: CausalLM) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(slot.shape, generator=generator) * 0.2 for name, slot in model.slots().items()}


def logits(model: CausalLM, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return PagedHarness(model, dtype).step([("a", PROMPT)])


def loaded_from(folder: Path, architecture: str = "GPT2LMHeadModel", config: dict[str, Any] = GPT2) -> CausalLM:
    model = make(architecture, config)
    load_weights(model, folder)
    return model


def test_shards_names_without_a_prefix_and_harmless_extras_load_the_same_model(tmp_path: Path) -> None:
    tensors = made_up_tensors(make("GPT2LMHeadModel", GPT2))
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(tensors, single / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.zeros(1, 1, 4, 4)
    bare["h.1.attn.masked_bias"] = torch.zeros(1)
    bare["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    names = sorted(bare)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file_name, members in shards.items():
        save_file({name: bare[name] for name in members}, sharded / file_name)
    weight_map = {name: file_name for file_name, members in shards.items() for name in members}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(loaded_from(single)), logits(loaded_from(sharded)))


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = made_up_tensors(make("LlamaForCausalLM", LLAMA))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as caught:
        loaded_from(tmp_path, "LlamaForCausalLM", LLAMA)
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "model.layers.0.mlp.up_proj.weight [3, 4] instead of [24, 16]" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "\n" not in message


def test_a_doubled_tensor_is_refused() -> None:
    model = make("LlamaForCausalLM", LLAMA)
    tensors = list(made_up_tensors(model).items())
    with pytest.raises(ValueError, match=r"twice: model\.norm\.weight"):
        model.load_weights([*tensors, ("model.norm.weight", torch.ones(16))])


def test_damaged_files_are_refused_before_they_are_mapped(tmp_path: Path) -> None:
    tensors = made_up_tensors(make("GPT2LMHeadModel", GPT2))
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFilesError, match="damaged"):
        loaded_from(tmp_path)


def test_a_folder_with_pickles_only_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelFilesError, match="can run code"):
        loaded_from(tmp_path)


def test_made_up_weights_depend_on_the_seed_alone() -> None:
    def made_up(seed: int) -> torch.Tensor:
        model = make("LlamaForCausalLM", LLAMA)
        load_weights(model, "no folder is read", "dummy", torch.float32, seed)
        return logits(model)

    assert torch.equal(made_up(3), made_up(3))
    assert not torch.equal(made_up(3), made_up(4))
    assert made_up(3).isfinite().all()


def test_made_up_tables_larger_than_the_buffer_have_no_equal_rows() -> None:
    from llmstack_model_runner.layers import WeightSlot
    from llmstack_model_runner.weights.dummy import dummy_weights

    slots = {"table": WeightSlot((5000, 1024), lambda _: None)}
    (_, table), *_ = dummy_weights(slots, 0)
    assert table.shape == (5000, 1024)
    assert len(set(table[:, 0].tolist())) > 4900


def test_made_up_weights_lie_where_they_were_asked_for_each_in_memory_of_its_own() -> None:
    from llmstack_model_runner.layers import WeightSlot
    from llmstack_model_runner.weights.dummy import dummy_weights

    slots = {name: WeightSlot((40, 10), lambda _: None) for name in ("first", "second")}
    tensors = [tensor for _, tensor in dummy_weights(slots, 0, torch.device("meta"))]
    assert [tensor.device.type for tensor in tensors] == ["meta", "meta"]
    assert all(tensor.untyped_storage().nbytes() == 40 * 10 * 4 for tensor in tensors)


def test_weights_are_converted_to_the_type_of_the_model(tmp_path: Path) -> None:
    tensors = made_up_tensors(make("GPT2LMHeadModel", GPT2))
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert resolve_dtype("auto", {}, tmp_path) is torch.bfloat16
    exact = loaded_from(tmp_path)
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        model = make("GPT2LMHeadModel", GPT2, dtype)
        load_weights(model, tmp_path)
        torch.testing.assert_close(logits(model, dtype), logits(exact), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", [*words_of(DType)[1:], *DTYPE_ALIASES])
def test_every_name_of_a_type_is_that_type_of_torch(name: str, tmp_path: Path) -> None:
    assert resolve_dtype(name, {}, tmp_path) is getattr(torch, name)


def test_unknown_formats_and_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="load format 'pt' is unknown; auto, safetensors, mistral, gguf and dummy are known"
    ):
        load_weights(make("GPT2LMHeadModel", GPT2), tmp_path, "pt")
    with pytest.raises(ValueError, match="dtype 'int8' is not supported; float32, bfloat16 and float16 are"):
        resolve_dtype("int8", {}, tmp_path)
    with pytest.raises(ValueError, match="float64"):
        resolve_dtype("auto", {"dtype": "float64"}, tmp_path)
    assert resolve_dtype("auto", {}, tmp_path, "dummy") is torch.float32


def test_tensors_that_no_layer_uses_are_listed_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = make("LlamaForCausalLM", LLAMA)
    tensors = made_up_tensors(model)
    model.load_weights([*tensors.items(), ("extra.b", torch.ones(1)), ("extra.a", torch.ones(1))])
    (record,) = caplog.records
    assert "2 tensors of the checkpoint are unexpected and not used: extra.a, extra.b" in record.getMessage()


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_bias_of_a_layer_without_one_must_be_zero(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = made_up_tensors(make("LlamaForCausalLM", LLAMA))
    name = f"{prefix}layers.0.mlp.up_proj.bias"
    save_file(tensors | {name: torch.zeros(24)}, tmp_path / "model.safetensors")
    loaded_from(tmp_path, "LlamaForCausalLM", LLAMA)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    save_file(tensors | {name: torch.eye(24)[3]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"biases that are not zero, of layers that have none: {name}"):
        loaded_from(tmp_path, "LlamaForCausalLM", LLAMA)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_named(value: float, dtype: torch.dtype) -> None:
    model = make("LlamaForCausalLM", LLAMA)
    tensors = {name: tensor.to(dtype) for name, tensor in made_up_tensors(model).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3, 1] = value
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has values that are NaN or infinite"):
        model.load_weights(tensors.items())


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "model.layers.0.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_numbers_without_their_scales_are_no_weights(name: str, dtype: torch.dtype) -> None:
    model = make("LlamaForCausalLM", LLAMA)
    tensors = made_up_tensors(model)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"{name}\.weight is stored as {kind} without the scales"):
        model.load_weights(tensors.items())


def test_an_embedding_too_large_for_the_type_is_named() -> None:
    model = make("LlamaForCausalLM", LLAMA, torch.float16)
    tensors = made_up_tensors(model)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
    tensors["model.embed_tokens.weight"][3, 1] = 1e6
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has values that are NaN or infinite"):
        model.load_weights(tensors.items())


def test_finite_weights_of_a_large_sum_load() -> None:
    model = make("LlamaForCausalLM", LLAMA)
    tensors = made_up_tensors(model)
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(3e38)
    model.load_weights(tensors.items())
