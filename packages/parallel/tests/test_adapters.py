"""Ranks and stages give the tokens of one rank under adapters, and refuse an adapter together."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_helpers.families import write_family
from parallel_helpers.recovery import check_another_engine_core
from parallel_helpers.schedules import NUM_BLOCKS, largest_difference, make_config, run_schedule
from parallel_helpers.thread_peers import ThreadPeers

from llmstack_model_runner.testing import identity_of, write_random_adapter
from llmstack_parallel.runner import ParallelRunner

NAME_TO_TARGETS = {
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj", "wte", "wpe", "lm_head"),
    "llama with one kv head": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head"),
    "mixtral": ("q_proj", "k_proj", "o_proj", "w1", "w3", "w2"),
    "gpt oss": ("q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"),
}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def write_adapters(folder: Path, model: Path, targets: tuple[str, ...], **fields: object) -> dict[str, Path]:
    paths = [
        write_random_adapter(folder / str(seed), model, targets, seed, rank=3 + seed, **fields)  # type: ignore[arg-type]  # by name
        for seed in (1, 2)
    ]
    return {identity_of(path, f"adapter-{path.name}"): path for path in paths}


@pytest.mark.parametrize(
    "name", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.full) for name in NAME_TO_TARGETS]
)
def test_ranks_give_the_tokens_of_one_and_stages_the_bits(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", name)
    adapters = write_adapters(tmp_path, model, NAME_TO_TARGETS[name])
    alone = run_schedule(make_config(model, **LORA), 1, adapters)
    assert alone.outputs != run_schedule(make_config(model), 1).outputs
    shared = run_schedule(make_config(model, tensor_parallel_size=2, **LORA), 1, adapters)
    assert largest_difference(alone, shared) < 1e-3
    staged = run_schedule(make_config(model, pipeline_parallel_size=2, **LORA), 1, adapters)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)
    both = run_schedule(make_config(model, tensor_parallel_size=2, pipeline_parallel_size=2, **LORA), 1, adapters)
    assert (both.outputs, both.logprobs) == (shared.outputs, shared.logprobs)
    for ranks in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        check_another_engine_core(make_config(model, **LORA, **ranks), adapters)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt oss", marks=pytest.mark.full)])
def test_ranks_share_the_updates_of_experts(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", name)
    adapters = write_adapters(tmp_path, model, (), target_parameters=EXPERTS)
    alone = run_schedule(make_config(model, **LORA), 1, adapters)
    assert alone.outputs != run_schedule(make_config(model), 1).outputs
    for options in ({}, {"enable_expert_parallel": True}):
        shared = run_schedule(make_config(model, tensor_parallel_size=2, **LORA, **options), 1, adapters)
        assert shared.outputs == alone.outputs
        assert largest_difference(alone, shared) < 1e-3
    staged = run_schedule(make_config(model, pipeline_parallel_size=2, **LORA), 1, adapters)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4"])
def test_adapters_over_quantized_layers_keep_their_bits_over_stages_and_engine_cores(
    scheme: str, tmp_path: Path
) -> None:
    name = "llama with one kv head"
    model = write_family(tmp_path / "model", name)
    adapters = write_adapters(tmp_path, model, NAME_TO_TARGETS[name])
    options = {**LORA, "quantization": scheme}
    alone = run_schedule(make_config(model, **options), 1, adapters)
    staged = run_schedule(make_config(model, pipeline_parallel_size=2, **options), 1, adapters)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)
    check_another_engine_core(make_config(model, tensor_parallel_size=2, **options), adapters)


def test_an_adapter_that_one_rank_cannot_read_is_in_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_family(tmp_path / "model", "gpt2")
    (identity, path), (other, other_path) = write_adapters(tmp_path, model, NAME_TO_TARGETS["gpt2"]).items()
    runner = ParallelRunner(make_config(model, tensor_parallel_size=2, **LORA), ThreadPeers)
    try:
        runner.load_model()
        runner.initialize_kv_cache(NUM_BLOCKS)
        with pytest.raises(ValueError, match="was not read"):
            runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        runner.announce_adapter(identity, str(path / "missing"))
        with pytest.raises(ValueError, match="no folder"):
            runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        assert runner._runner is not None
        assert identity not in runner._runner._store
        runner.announce_adapter(other, str(other_path))
        runner.add_adapter(other, runner.read_adapter(other, str(other_path)))
        assert other in runner._runner._store
    finally:
        runner.shutdown()
