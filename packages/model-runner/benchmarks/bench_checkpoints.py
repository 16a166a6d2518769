"""Checkpoints of the 1.1B Llama shape: loading, memory, and one stream of each format against bfloat16, in turns.

The model is a fourth of that shape: 6 of 22 layers, and 8,192 of 32,000 tokens, so that the head keeps its share.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from llmstack_model_runner.layers import weight_slot
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.testing import StepDriver
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_TURNS, NUM_BLOCKS, CONTEXT, GROUP = 25, 16, 32, 128
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
# Format to the bits of its weights, and the fields of a compressed-tensors checkpoint.
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"format": "int-quantized", "num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8": {"format": "float-quantized", "num_bits": 8, "type": "float", "strategy": "channel"},
    "int4": {"format": "pack-quantized", "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
}


def write_checkpoint(folder: Path, kind: str) -> Path:
    """Writes random bits that the format allows."""
    folder.mkdir()
    config = dict(SHAPE)
    if FORMATS[kind]:
        weights = {name: value for name, value in FORMATS[kind].items() if name != "format"} | {"symmetric": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": FORMATS[kind]["format"], "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group},
        }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for name, slot in load_model_class("LlamaForCausalLM")(SHAPE, torch.bfloat16, torch.device("cpu")).slots().items():
        if slot.load_stored is None or name == "lm_head.weight" or kind == "bfloat16":
            tensors[name] = (torch.randn(slot.shape) * 0.02).bfloat16()
        else:
            tensors |= _stored(name.removesuffix(".weight"), kind, *slot.shape)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def _stored(name: str, kind: str, num_outputs: int, num_inputs: int) -> dict[str, torch.Tensor]:
    scales = torch.rand(num_outputs, num_inputs // GROUP if kind == "int4" else 1).bfloat16() * 1e-3
    if kind == "int4":
        words = torch.randint(-(1 << 31), 1 << 31, (num_outputs, num_inputs // 8), dtype=torch.int32)
        shape = torch.tensor([num_outputs, num_inputs])
        return {f"{name}.weight_packed": words, f"{name}.weight_scale": scales, f"{name}.weight_shape": shape}
    numbers = torch.randint(-100, 100, (num_outputs, num_inputs), dtype=torch.int8)
    weight = numbers if kind == "int8" else numbers.to(torch.bfloat16).to(torch.float8_e4m3fn)
    return {f"{name}.weight": weight, f"{name}.weight_scale": scales}


def make_runner(folder: Path) -> ModelRunner:
    runner = ModelRunner(ModelRunnerConfig(str(folder), dtype="bfloat16", max_model_len=256, max_num_seqs=4))
    runner.load_model()
    return runner


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(folder / kind, kind) for kind in FORMATS}


def test_one_stream_of_each_format(benchmark: Any, folders: dict[str, Path]) -> None:
    """How many times as fast as bfloat16: by wall time, and by the time of all threads."""
    drivers: dict[str, StepDriver] = {}
    for kind, folder in folders.items():
        runner = make_runner(folder)
        runner.initialize_kv_cache(NUM_BLOCKS)
        drivers[kind] = StepDriver(runner, NUM_BLOCKS)
        drivers[kind].add("a", list(range(CONTEXT)), SamplingParams(temperature=0.0))
        drivers[kind].step({"a": CONTEXT})
        drivers[kind].step({"a": 1})  # is captured
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in folders}

    def turn() -> None:
        for kind, driver in drivers.items():
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            driver.step({"a": 1})
            times[kind].append((time.perf_counter() - start_s, time.process_time() - cpu_start_s))

    benchmark.pedantic(turn, rounds=NUM_TURNS, warmup_rounds=2)
    for place, name in enumerate(("wall", "cpu")):
        medians = {kind: statistics.median(pair[place] for pair in found) for kind, found in times.items()}
        ratios = {kind: round(medians["bfloat16"] / median, 2) for kind, median in medians.items()}
        benchmark.extra_info[name] = ratios
        print(f"{name}: {ratios}, bfloat16 {medians['bfloat16'] * 1e3:.1f} ms")


@pytest.mark.parametrize("kind", FORMATS)
def test_loading(benchmark: Any, folders: dict[str, Path], kind: str) -> None:
    """Rates of a process of its own: from the disk, from the page cache, and without the check for NaN."""
    size = (folders[kind] / "model.safetensors").stat().st_size
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "unchecked": []}
    for _ in range(3):
        for way, runs in found.items():
            runs.append(_load_elsewhere(folders[kind], way))
    benchmark.pedantic(lambda: None, rounds=1)
    for way, runs in found.items():
        seconds = statistics.median(run["load_s"] for run in runs)
        cpu_s = statistics.median(run["cpu_s"] for run in runs)
        above = statistics.median(run["pss"] for run in runs) - size
        benchmark.extra_info[way] = {"gb_per_s": size / seconds / 1e9, "cpu_s": cpu_s, "above_weights": above}
        print(f"{kind} {way}: {size / seconds / 1e9:.2f} GB/s, {cpu_s:.2f} s of processors, {above / 1e6:.0f} MB more")


def _load_elsewhere(folder: Path, way: str) -> dict[str, float]:
    command = [sys.executable, __file__, str(folder), way]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def _load(folder: Path, way: str) -> dict[str, float]:
    with (folder / "model.safetensors").open("rb") as file:
        if way == "cold":
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 24):
                pass
    if way == "unchecked":
        weight_slot.finite = lambda tensor: tensor
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    runner = make_runner(folder)
    load_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    runner.initialize_kv_cache(NUM_BLOCKS)
    kv_bytes = NUM_BLOCKS * runner.kv_cache_spec().bytes_per_block
    return {"load_s": load_s, "cpu_s": cpu_s, "pss": psutil.Process().memory_full_info().pss - kv_bytes}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_load(Path(sys.argv[1]), sys.argv[2])))
