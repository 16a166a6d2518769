"""Packed weights that are kept: a later start reads them, on one rank and on several, whatever they are stored as."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from model_runner_helpers.quantized_layers import CASES
from parallel_helpers.families import FAMILIES, write_family
from parallel_helpers.quantized import EXPERTS_IN_MXFP4, GGUF, write_checkpoint
from parallel_helpers.schedules import Run, make_config, run_schedule

from llmstack_kernels.linear import packing_version
from llmstack_model_runner.testing import identity_of, write_random_adapter

pytestmark = pytest.mark.skipif(not packing_version("cpu"), reason="only native kernels have packed weights to keep")

CACHE = "llmstack_model_runner.weights.pack_cache"
LAYERS = "llmstack_model_runner.layers"
PACKERS = (
    "packing.pack_linear", "packing.pack_stored_linear", "experts.pack_experts", "stacked_experts.pack_experts",
)  # fmt: skip
ALONE: dict[str, Any] = {}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("awq", TENSOR),
    (EXPERTS_IN_MXFP4, ALONE),
    ("mixtral", PIPELINE | {"quantization": "int4"}),
]
FULL: list[tuple[str, dict[str, Any]]] = [
    *((case, {"dtype": dtype}) for case in (*CASES, "gguf") for dtype in ("bfloat16", "float16")),
    *((case, ranks) for case in (*CASES, "gguf", EXPERTS_IN_MXFP4) for ranks in (TENSOR, PIPELINE)),
    ("compressed w8a8", TENSOR | {"quantization": "int8_dynamic"}),
    *(("mixtral", ranks | {"quantization": "int8_dynamic"}) for ranks in (ALONE, TENSOR, PIPELINE)),
    ("mixtral", TENSOR | {"enable_expert_parallel": True}),
    *((case, TENSOR) for case in GGUF if case != "gguf"),
    ("gpt oss", TENSOR | {"enable_expert_parallel": True, "quantization": "int8"}),
    ("llama", TENSOR | {"quantization": "int8"}),
]


def run(folder: Path, options: dict[str, Any], adapters: Mapping[str, Path] = MappingProxyType({})) -> Run:
    """One schedule; what was packed for it is in files when it returns."""
    done = run_schedule(make_config(folder, pack_cache=True, **options), 1, adapters)
    for thread in threading.enumerate():
        if thread.name == "pack-cache":
            thread.join()
    return done


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a layer was packed again")


@pytest.mark.parametrize(
    ("case", "options"),
    [*QUICK, *(pytest.param(case, options, marks=pytest.mark.full) for case, options in FULL)],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())) or "alone",
)
def test_a_second_start_reads_no_quantized_weight_packs_nothing_and_computes_the_same_bits(
    case: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{CACHE}.MIN_BYTES", 1)
    monkeypatch.setattr(f"{CACHE}.WRITE_DELAY_S", 0.0)
    model = tmp_path / "model"
    model.mkdir()
    folder = write_family(model, case) if case in FAMILIES else write_checkpoint(model, case)
    first = run(folder, options)
    assert sum(map(len, first.outputs.values())) > 10
    num_ranks = make_config(folder, **options).num_ranks
    assert len([*(tmp_path / "cache" / "llmstack" / "packed").glob("*.packed")]) == num_ranks
    for packer in PACKERS:
        monkeypatch.setattr(f"{LAYERS}.{packer}", refuse)
    monkeypatch.setattr("llmstack_model_runner.checkpoint_formats.read._read_layer", refuse)
    second = run(folder, options)
    assert (second.outputs, second.logprobs) == (first.outputs, first.logprobs)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama with one kv head"])
def test_adapters_over_weights_that_were_kept_compute_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head, too, whose table is recognized by sums that a kept weight does not have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{CACHE}.MIN_BYTES", 1)
    monkeypatch.setattr(f"{CACHE}.WRITE_DELAY_S", 0.0)
    folder = write_family(tmp_path / "model", name)
    adapter = write_random_adapter(tmp_path / "style", folder, ("c_attn", "q_proj", "o_proj", "lm_head"), rank=3)
    adapters = {identity_of(adapter, "style"): adapter}
    options = {"enable_lora": True, "max_lora_rank": 8, "quantization": "int8"}
    first = run(folder, options, adapters)
    for packer in PACKERS:
        monkeypatch.setattr(f"{LAYERS}.{packer}", refuse)
    second = run(folder, options, adapters)
    assert (second.outputs, second.logprobs) == (first.outputs, first.logprobs)
