"""A runner serves a quantized checkpoint as it serves the weights that the checkpoint stands for, and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.quantized_layers import CASES, Draws
from safetensors.torch import load_file, save_file

from llmstack_kernels.linear import computes_stored
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

PROMPTS = {"a": list(range(1, 40)), "b": [5, 8, 13]}
CASE = "gptq 4 with an order"


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """A quantized GPT-2, whose plain checkpoint stores the transpose, and the same with the weights that it means."""
    quantized, plain = folder / "quantized", folder / "plain"
    quantized.mkdir()
    plain.mkdir()
    write_gpt2_checkpoint(plain)
    fields, make = CASES[CASE]
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    given = load_file(plain / "model.safetensors")
    tensors, meant = dict(given), {}
    for seed, (name, tensor) in enumerate(given.items()):
        if tensor.ndim == 2 and ".h." in name:
            made, weight = make(Draws(tensor.shape[1], tensor.shape[0], seed))
            meant[name] = torch.from_numpy(weight).float().t().contiguous()
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in made.items()}
    save_file(given | meant, plain / "model.safetensors")
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    half = len(tensors) // 2  # the tensors of a layer are in two files
    weight_map = {}
    for index, names in enumerate((sorted(tensors)[:half], sorted(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, quantized / f"model-{index}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{index}.safetensors")
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return quantized, plain


def start(folder: Path, **values: Any) -> ModelRunner:
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=128, block_size=4, device="cpu", **values))
    runner.load_model()
    runner.initialize_kv_cache(128)
    return runner


def outputs_of(runner: ModelRunner) -> dict[str, list[int]]:
    driver = StepDriver(runner, 128)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    return driver.run(12)


def test_a_runner_serves_a_checkpoint_in_several_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, plain = write_checkpoints(tmp_path)
    with caplog.at_level(logging.INFO):
        runner = start(quantized, dtype="float32")
    assert outputs_of(runner) == outputs_of(start(plain, dtype="float32"))
    described = runner.backends()["quantization"]
    assert described.startswith("gptq of the checkpoint")
    assert ("widened" in described) != computes_stored(torch.float32, "cpu", "int4")
    assert f"quantization: {described}" in caplog.messages
    assert any(message.startswith("weights loaded") and "gptq" in message for message in caplog.messages)


def test_a_checkpoint_named_by_the_option_has_equal_tokens_alone_and_in_a_batch(tmp_path: Path) -> None:
    quantized, _ = write_checkpoints(tmp_path)
    runner = start(quantized, dtype="bfloat16", quantization="gptq")
    together = outputs_of(runner)
    for name, prompt in PROMPTS.items():
        driver = StepDriver(start(quantized, dtype="bfloat16"), 128)
        driver.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        assert driver.run(12)[name] == together[name]


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    quantized, _ = write_checkpoints(tmp_path)
    first, second = (load_file(quantized / f"model-{index}.safetensors") for index in (0, 1))
    save_file(second | first, quantized / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"^model-1.safetensors: the tensor .* is in another file too\.$"):
        start(quantized)
