"""A quantized model is the model of its rounded weights, computes alike in any batch, and drops what it read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from safetensors.torch import load_file, save_file

from llmstack_kernels.linear import INT4_DYNAMIC, INT8_DYNAMIC, QUANTIZATIONS, computes_quantized, quantize
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.layers.packing import Packing, pack, packed_linears, packing
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import Model, load_model_class
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_model_runner.weights import describe_quantization, load_weights, num_weight_bytes, scheme_on
from llmstack_types import ModelRunnerConfig, SamplingParams
from llmstack_types.vocabulary import RoundingScheme, words_of

CPU = torch.device("cpu")
PROMPTS = {"a": list(range(1, 40)), "b": [5, 8, 13], "c": [90, 3, 50, 2, 7, 31, 64]}
BERT: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 97,
}  # fmt: skip


def test_the_kernels_have_every_scheme_that_an_option_may_name() -> None:
    assert words_of(RoundingScheme) == (*QUANTIZATIONS, INT8_DYNAMIC, INT4_DYNAMIC)


def load(folder: Path, scheme: str | None) -> Any:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = load_model_class("GPT2LMHeadModel")(config, torch.float32, CPU)
    load_weights(model, folder, quantization=scheme)
    return model


def round_checkpoint(source: Path, target: Path, scheme: str) -> None:
    """The same checkpoint with the weights of its linear layers replaced by what the integers stand for."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            tensors[name] = quantize(tensor, scheme).dequantize(torch.float32)
        elif tensor.ndim == 2 and ".h." in name:  # GPT-2 stores the transpose
            tensors[name] = quantize(tensor.t(), scheme).dequantize(torch.float32).t().contiguous()
    save_file(tensors, target / "model.safetensors")


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_a_quantized_model_is_the_model_of_its_rounded_weights(tmp_path: Path, scheme: str) -> None:
    given, rounded = tmp_path / "given", tmp_path / "rounded"
    given.mkdir()
    rounded.mkdir()
    write_gpt2_checkpoint(given, spread=0.2, tie_word_embeddings=False)
    round_checkpoint(given, rounded, scheme)
    logits = {
        name: PagedHarness(load(folder, quantized), torch.float32).step([("a", PROMPTS["a"])])
        for name, folder, quantized in (("quantized", given, scheme), ("rounded", rounded, None), ("full", given, None))
    }
    torch.testing.assert_close(logits["quantized"], logits["rounded"], atol=1e-4, rtol=1e-4)
    assert (logits["quantized"] - logits["full"]).abs().max() > 1e-3


def start(folder: Path, scheme: str | None, **values: Any) -> ModelRunner:
    config = ModelRunnerConfig(
        str(folder), max_model_len=128, block_size=4, device="cpu", quantization=scheme, **values
    )
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(128)
    return runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", [*QUANTIZATIONS, INT8_DYNAMIC, INT4_DYNAMIC])
def test_greedy_output_is_the_same_alone_in_a_batch_and_in_chunks(tmp_path: Path, scheme: str, dtype: str) -> None:
    runner = start(write_gpt2_checkpoint(tmp_path), scheme, dtype=dtype)
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    alone = {}
    for name, prompt in PROMPTS.items():
        driver = StepDriver(runner, 128)
        driver.add(name, prompt, greedy)
        alone |= driver.run(12)
        driver.remove(name)
        driver.step({})
    driver = StepDriver(runner, 128)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, greedy)
    for num_tokens in (1, 16, 5):  # the long prompt comes in chunks, beside the others
        driver.step({"a": num_tokens} | {name: driver.num_left(name) for name in ("b", "c")})
    while any(len(output) < 12 for output in driver.outputs.values()):
        driver.step({name: driver.num_left(name) for name in PROMPTS})
    assert {name: output[:12] for name, output in driver.outputs.items()} == alone
    assert len({tuple(output) for output in alone.values()}) == len(PROMPTS)


def test_rounded_inputs_stay_close_to_the_model_and_say_what_they_are(tmp_path: Path) -> None:
    folder = write_gpt2_checkpoint(tmp_path, spread=0.2, tie_word_embeddings=False)
    full, rounded = (
        PagedHarness(load(folder, scheme), torch.float32).step([("a", PROMPTS["a"])]) for scheme in (None, INT8_DYNAMIC)
    )
    error = (full - rounded).norm() / full.norm()
    assert 1e-4 < error < 0.05
    described = start(folder, INT8_DYNAMIC).backends()["quantization"]
    assert described.startswith(INT8_DYNAMIC)
    assert (described == INT8_DYNAMIC) == computes_quantized(torch.float32, "cpu", INT8_DYNAMIC)


def test_inputs_that_are_rounded_in_groups_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="int4_dynamic is computed on CPUs only"):
        scheme_on(torch.device("cuda"), INT4_DYNAMIC, INT4_DYNAMIC)
    assert scheme_on(torch.device("cuda"), INT8_DYNAMIC, INT8_DYNAMIC) == INT8_DYNAMIC
    assert scheme_on(torch.device("cuda"), INT4_DYNAMIC, None) is None  # the default of a GGUF file


def test_the_choice_holds_within_its_block_only() -> None:
    weight = torch.randn(8, 32)
    with packed_linears("int4"):
        with packed_linears(is_batch_invariant=True):
            assert packing() == Packing(None, True)
        packed = pack(weight, None)
    assert packing() == Packing(None, False)
    expected = quantize(weight, "int4").dequantize(torch.float32)
    torch.testing.assert_close(packed(torch.eye(32)), expected.t(), atol=1e-5, rtol=1e-5)


def test_a_failing_load_leaves_nothing_quantized_behind(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)
    save_file({"transformer.nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="nothing"):
        load(tmp_path, "int8")
    assert packing() == Packing()


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_encoders_are_quantized_too(scheme: str) -> None:
    hidden = {}
    for quantized in (None, scheme):
        model: Model = load_model_class("BertModel")(BERT, torch.float32, CPU)
        load_weights(model, "", "dummy", quantization=quantized)
        layer = model._layers[0]  # type: ignore[attr-defined]  # what it packed is the point
        hidden[quantized] = layer._qkv(torch.eye(32))
    assert not torch.equal(hidden[None], hidden[scheme])
    torch.testing.assert_close(hidden[None], hidden[scheme], atol=2e-2, rtol=0.0)


@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_a_loaded_model_holds_no_tensor_of_the_file(tmp_path: Path, scheme: str | None) -> None:
    model = load(write_gpt2_checkpoint(tmp_path, tie_word_embeddings=False), scheme)
    table = model._tokens.weight
    assert table.untyped_storage().nbytes() == table.nbytes


@pytest.mark.parametrize(("scheme", "num_bits"), [(None, 16), ("int8", 8.125), ("int4", 4.5)])
def test_threads_are_reckoned_by_quantized_bytes(scheme: str | None, num_bits: float) -> None:
    model = load_model_class("BertModel")(BERT, torch.bfloat16, CPU)
    num_weights = sum(torch.Size(slot.shape).numel() for slot in model.slots().values())
    assert num_weight_bytes(model, torch.bfloat16, scheme) == int(num_weights * num_bits / 8)


@pytest.mark.parametrize("is_widened", [False, True])
def test_log_and_backends_say_how_quantized_layers_are_computed(
    tmp_path: Path, is_widened: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not computes_quantized(torch.bfloat16, "cpu"):
        pytest.skip("the native kernels are not built")
    if is_widened:
        monkeypatch.setattr("llmstack_model_runner.weights.quantization.computes_quantized", lambda *_: False)
    folder = write_gpt2_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO):
        runner = start(folder, "int4", dtype="bfloat16")
    described = runner.backends()["quantization"]
    assert described.startswith("int4")
    assert ("saves neither memory nor time" in described) == is_widened
    assert f"quantization: {described}" in caplog.messages
    assert any(message.startswith("weights loaded") and "int4" in message for message in caplog.messages)
    assert "quantization" not in start(folder, None).backends()


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    with pytest.raises(ValueError, match=r"^config.json: quantization_config: .*quantized already \(by gptq\)"):
        start(tmp_path, "int8")


def test_an_unknown_scheme_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="quantization 'int3' is unknown; use int8, int4 or fp8"):
        start(tmp_path, "int3", dtype="float32")


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_models_of_transformers_are_quantized_alike(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("transformers")
    write_gpt2_checkpoint(tmp_path, spread=0.2)
    outputs = {}
    for model_impl in ("llmstack", "transformers"):
        driver = StepDriver(start(tmp_path, scheme, model_impl=model_impl), 128)
        driver.add("a", PROMPTS["a"], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        outputs[model_impl] = driver.run(12)["a"]
    assert outputs["llmstack"] == outputs["transformers"]


def test_the_report_of_a_gguf_file_says_whether_inputs_are_rounded() -> None:
    """Numeric contracts are made of it."""
    found = read_format({"quantization_config": {"quant_method": "gguf"}})
    exact, rounded = (describe_quantization(scheme, torch.float32, CPU, found) for scheme in (None, INT4_DYNAMIC))
    assert exact.startswith("gguf of the checkpoint")
    assert rounded.startswith(f"gguf of the checkpoint, inputs rounded by {INT4_DYNAMIC}")
    assert "rounded" not in exact
