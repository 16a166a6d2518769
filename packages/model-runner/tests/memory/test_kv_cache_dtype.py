"""Keys and values in another type than the model's: smaller blocks, nearly the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_runner_helpers.device_runners import needs_native_kernels

from llmstack_model_runner.memory.kv_cache_dtype import check_capability, resolve_kv_cache_dtype
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams, SchedulerOutput

NUM_BLOCKS, NUM_HOST_BLOCKS = 32, 16
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [50, 40, 30, 20, 10] * 4}
TOLERANCE = 0.2
"""Of a log-probability: a stored number has 4 significant bits, so that it is wrong by up to 1 in 16."""


def start(folder: Path, kv_cache_dtype: str, dtype: str = "float32") -> ModelRunner:
    config = ModelRunnerConfig(
        str(folder), dtype=dtype, max_model_len=128, block_size=4, device="cpu", kv_cache_dtype=kv_cache_dtype
    )
    runner = ModelRunner(config)
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(NUM_BLOCKS, NUM_HOST_BLOCKS)
    return runner


def prompt_logprobs(runner: ModelRunner) -> dict[str, list[float]]:
    """Of each prompt's tokens but the first."""
    driver = StepDriver(runner, NUM_BLOCKS)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    output = driver.step({name: driver.num_left(name) for name in PROMPTS})
    return {name: [entry.logprobs[0] for entry in entries] for name, entries in output.prompt_logprobs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"), spread=0.15, n_head=2, n_embd=64)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
def test_log_probabilities_are_nearly_those_of_full_precision(folder: Path, kv_cache_dtype: str) -> None:
    expected = prompt_logprobs(start(folder, "auto"))
    found = prompt_logprobs(start(folder, kv_cache_dtype))
    errors = [abs(a - b) for name in PROMPTS for a, b in zip(found[name], expected[name], strict=True)]
    assert 0.0 < max(errors) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_of_fp8_takes_a_byte_per_number(folder: Path, dtype: str) -> None:
    spec = start(folder, "fp8", dtype).kv_cache_spec()
    assert (spec.dtype, spec.kv_cache_dtype) == (dtype, "float8_e4m3fn")
    assert spec.bytes_per_block == 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, tokens
    assert start(folder, "auto", dtype).kv_cache_spec().bytes_per_block == spec.bytes_per_block * (
        torch.finfo(getattr(torch, dtype)).bits // 8
    )


def test_a_round_trip_by_the_host_changes_no_token(folder: Path) -> None:
    """Stored numbers are rounded once, and copied as they are."""
    runner = start(folder, "fp8")
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", PROMPTS["c"], SamplingParams(temperature=0.0))
    driver.step({"a": 20})
    blocks = driver._blocks["a"]
    pairs = [(block_id, place) for place, block_id in enumerate(blocks)]
    runner.execute_model(SchedulerOutput(90, swap_outs=pairs)).result()
    for keys, values in runner._kv_caches:
        keys[blocks], values[blocks] = torch.tensor(3.0).to(keys.dtype), torch.tensor(3.0).to(keys.dtype)
    runner.execute_model(SchedulerOutput(91, swap_ins=[(host, block) for block, host in pairs])).result()
    for _ in range(4):
        driver.step({"a": 1})
    again = StepDriver(start(folder, "fp8"), NUM_BLOCKS)
    again.add("a", PROMPTS["c"], SamplingParams(temperature=0.0))
    assert again.run(5)["a"] == driver.outputs["a"]


@needs_native_kernels
def test_the_numeric_contract_names_a_kv_cache_that_pytorch_reads(folder: Path) -> None:
    assert "KV cache of float8_e4m3fn" in start(folder, "fp8").backends()["numeric_contract"]
    assert start(folder, "auto").backends()["numeric_contract"] == "holds"


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.float32), ("float16", torch.bfloat16)])
def test_a_type_that_no_kernel_reads_is_refused_with_what_to_use(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"use --dtype {name}"):
        resolve_kv_cache_dtype(name, dtype)
    assert resolve_kv_cache_dtype(name, getattr(torch, name)) == getattr(torch, name)


def test_a_gpu_that_cannot_read_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp8 needs .* 8\.9; this one has 8\.0"):
        check_capability(torch.float8_e4m3fn, (8, 0))
    check_capability(torch.float8_e4m3fn, (8, 9))
    check_capability(torch.float8_e4m3fn, (9, 0))
    check_capability(torch.bfloat16, (8, 0))


def test_a_type_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype 'int3' .* auto, bfloat16"):
        resolve_kv_cache_dtype("int3", torch.float32)
