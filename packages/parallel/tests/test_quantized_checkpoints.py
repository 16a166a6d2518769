"""Quantized checkpoints on ranks and stages, in another engine core, and a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_runner_helpers.quantized_layers import CASES
from parallel_helpers.families import FAMILIES, write_family
from parallel_helpers.quantized import EXPERTS_IN_MXFP4, GGUF, write_checkpoint
from parallel_helpers.recovery import check_another_engine_core
from parallel_helpers.schedules import Run, largest_difference, make_config, run_schedule

from llmstack_model_runner.testing import identity_of, write_random_adapter

QUICK = ("awq",)
ALONE: dict[str, Any] = {}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [
        case if case in QUICK else pytest.param(case, marks=pytest.mark.full)
        for case in (*CASES, EXPERTS_IN_MXFP4, *GGUF)
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
    both = run_schedule(make_config(folder, **TENSOR, **PIPELINE), seed=1)
    assert (both.outputs, both.logprobs) == (shared.outputs, shared.logprobs)
    for ranks in (ALONE, TENSOR, PIPELINE):
        check_another_engine_core(make_config(folder, **ranks))


@pytest.mark.full
def test_quantized_experts_are_spread_over_ranks_whole_with_and_without_adapters(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, EXPERTS_IN_MXFP4)
    targets = ("q_proj", "v_proj", "o_proj")
    path = write_random_adapter(tmp_path / "adapter", folder, targets, 1, rank=4)
    adapters = {identity_of(path, "adapter"): path}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    for options, loaded in ((ALONE, {}), (lora, adapters)):
        alone = run_schedule(make_config(folder, **options), 5, loaded)
        for stages in (ALONE, PIPELINE):
            config = make_config(folder, enable_expert_parallel=True, **TENSOR, **stages, **options)
            assert largest_difference(alone, run_schedule(config, 5, loaded)) < 1e-3


SCHEMES = ("int8", "int4", "int8_dynamic")
ROUNDED = [("llama", "int8_dynamic")]
ALSO_ROUNDED = [
    ("compressed w8a8", "int8_dynamic"),
    *((name, scheme) for name in ("gpt2", "llama", "mixtral", "gpt oss") for scheme in SCHEMES),
]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [*ROUNDED, *(pytest.param(*pair, marks=pytest.mark.full) for pair in ALSO_ROUNDED if pair not in ROUNDED)],
)
def test_what_is_quantized_while_loading_keeps_its_bits_over_runs_stages_and_engine_cores(
    name: str, scheme: str, tmp_path: Path
) -> None:
    """Ranks round their own parts of rows of inputs, so that their numbers are close to those of one rank."""
    folder = write_family(tmp_path / "model", name) if name in FAMILIES else write_checkpoint(tmp_path, name)
    runs = []
    for ranks in (ALONE, TENSOR, PIPELINE):
        config = make_config(folder, quantization=scheme, **ranks)
        first, again = run_schedule(config, seed=6), run_schedule(config, seed=6)
        assert sum(map(len, first.outputs.values())) > 10
        assert (first.outputs, first.logprobs) == (again.outputs, again.logprobs)
        check_another_engine_core(config)
        runs.append(first)
    alone, shared, staged = runs
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)
    assert difference_of_first_tokens(alone, shared) < (0.6 if scheme == "int4" else 0.25)


def difference_of_first_tokens(run: Run, other: Run) -> float:
    """Between the largest log-probabilities of the first token of each request, whose prompts are equal."""
    pairs = [(entries[0], other.logprobs[request_id][0]) for request_id, entries in run.logprobs.items()]
    return max(abs(max(mine.logprobs) - max(theirs.logprobs)) for mine, theirs in pairs)
