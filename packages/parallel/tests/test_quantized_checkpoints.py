"""Quantized checkpoints on ranks and stages, in another engine core, and a second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_runner_helpers.gguf_models import write_model
from model_runner_helpers.quantized_layers import CASES, Draws
from parallel_helpers.families import FAMILIES
from parallel_helpers.schedules import NUM_BLOCKS, largest_difference, make_config, run_schedule
from safetensors.torch import save_file

from llmstack_model_files import resolve_model
from llmstack_model_runner.layers.weight_slot import WeightKind
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.testing import StepDriver
from llmstack_types import ModelRunnerConfig, SamplingParams

QUICK = ("awq",)
EXPERTS_IN_MXFP4 = "gpt-oss"
NUM_TOKENS = 10


def write_checkpoint(folder: Path, case: str) -> Path:
    """A random model whose linear layers have the format of the case."""
    if case == "gguf":
        write_model(folder / "model.gguf", "llama", lambda name: "Q6_K" if "down" in name else "Q4_K")
        return resolve_model(str(folder / "model.gguf"))
    is_stacked = case == EXPERTS_IN_MXFP4
    architecture, config = FAMILIES["gpt oss" if is_stacked else "llama"]
    config = config | ({"intermediate_size": 64} if is_stacked else {"hidden_size": 128, "intermediate_size": 128})
    fields, make = CASES["mxfp4" if is_stacked else case]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    model = load_model_class(architecture)(config, torch.float32, torch.device("cpu"))
    for seed, (name, slot) in enumerate(model.slots().items()):
        is_expert = len(slot.shape) == 3
        if slot.load_stored is None or name == "lm_head.weight" or is_expert != is_stacked:
            values = torch.randn(slot.shape, generator=generator) * 0.25
            tensors[name] = values + 1 if slot.kind is WeightKind.SCALE else values
        elif is_expert:
            count, num_inputs, num_outputs = slot.shape
            blocks = torch.randint(0, 256, (count, num_outputs, num_inputs // 32, 16), generator=generator)
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
            exponents = torch.randint(121, 126, (count, num_outputs, num_inputs // 32), generator=generator)
            tensors[f"{name}_scales"] = exponents.to(torch.uint8)
        else:
            num_outputs, num_inputs = slot.stored_shape or slot.shape
            made, _ = make(Draws(num_outputs, num_inputs, seed))
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in made.items()}
    values = {"architectures": [architecture], **config, "quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [
        case if case in QUICK else pytest.param(case, marks=pytest.mark.full)
        for case in (*CASES, EXPERTS_IN_MXFP4, "gguf")
    ],
)
def test_a_quantized_checkpoint_gives_the_tokens_of_one_rank_and_the_bits_of_one_stage(
    case: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, case)
    alone = run_schedule(make_config(folder), seed=1)
    assert sum(map(len, alone.outputs.values())) > 10
    again = run_schedule(make_config(folder), seed=1)  # as a replay computes it
    assert (again.outputs, again.logprobs) == (alone.outputs, alone.logprobs)
    shared = run_schedule(make_config(folder, tensor_parallel_size=2), seed=1)
    assert largest_difference(alone, shared) < 1e-3
    staged = run_schedule(make_config(folder, pipeline_parallel_size=2), seed=1)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)
    check_another_engine_core(make_config(folder))


def check_another_engine_core(config: ModelRunnerConfig) -> None:
    """A request goes on in a runner that has read the checkpoint again, as after a crash."""
    params = SamplingParams(temperature=0.8, seed=5)
    prompt = [5, 17, 2, 44, 8, 1, 30]

    def start() -> StepDriver:
        runner = ModelRunner(config)
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        return StepDriver(runner, NUM_BLOCKS)

    first = start()
    first.add("a", prompt, params)
    whole = list(first.run(NUM_TOKENS)["a"])
    second = start()
    second.add("a", prompt, params)
    second.outputs["a"].extend(whole[:4])  # what a journal has
    second.preempt("a")
    assert second.run(NUM_TOKENS - 4)["a"] == whole
