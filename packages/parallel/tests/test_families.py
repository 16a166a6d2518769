"""Several ranks give the tokens of one, for every family, on random schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parallel_helpers.families import FAMILIES, write_family
from parallel_helpers.schedules import largest_difference, make_config, run_schedule

from llmstack_kernels.grouped_linear import sum_choices
from llmstack_model_runner.layers import experts
from llmstack_model_runner.testing import write_random_weights

# What their layers share with another family is tested there.
ALIKE = ("qwen2", "gemma", "gemma 2", "gemma 3", "falcon with one kv head", "mistral with windows", "stablelm")
EACH = [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in FAMILIES]
FEW = ("gpt2", "gemma 4 with experts", "llama with one kv head")
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name not in FEW]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name", EACH)
def test_two_tensor_parallel_ranks_give_the_same_tokens_and_two_stages_the_same_bits(name: str, folders: Path) -> None:
    folder = write_family(folders / name, name)
    alone = run_schedule(make_config(folder), seed=1)
    assert sum(map(len, alone.outputs.values())) > 10
    shared = run_schedule(make_config(folder, tensor_parallel_size=2), seed=1)
    assert largest_difference(alone, shared) < 1e-4
    staged = run_schedule(make_config(folder, pipeline_parallel_size=2), seed=1)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)


@pytest.mark.parametrize("name", [*FEW, *OTHERS])
def test_stages_of_several_ranks_have_the_bits_of_one_stage(name: str, folders: Path) -> None:
    folder = write_family(folders / name, name)
    shared = run_schedule(make_config(folder, tensor_parallel_size=2), seed=2)
    both = run_schedule(make_config(folder, tensor_parallel_size=2, pipeline_parallel_size=2), seed=2)
    assert (both.outputs, both.logprobs) == (shared.outputs, shared.logprobs)


@pytest.mark.parametrize(
    "name", [name if name == "gemma" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_stages_pass_states_on_in_the_type_of_the_model(name: str, folders: Path) -> None:
    """Scales of Gemma's norms have another one."""
    folder = write_family(folders / name, name)
    alone = run_schedule(make_config(folder, dtype="bfloat16"), seed=1)
    staged = run_schedule(make_config(folder, dtype="bfloat16", pipeline_parallel_size=2), seed=1)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 9))
@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_or_three_stages_give_the_tokens_of_one(name: str, seed: int, folders: Path) -> None:
    folder = write_family(folders / name, name)
    alone = run_schedule(make_config(folder), seed)
    assert largest_difference(alone, run_schedule(make_config(folder, tensor_parallel_size=4), seed)) < 1e-4
    staged = run_schedule(make_config(folder, pipeline_parallel_size=3), seed)
    assert (staged.outputs, staged.logprobs) == (alone.outputs, alone.logprobs)


@pytest.mark.parametrize("in_one_tensor", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3 with experts", pytest.param("gpt oss", marks=pytest.mark.full)])
def test_experts_spread_over_ranks_in_uneven_counts_give_the_same_tokens(
    name: str, in_one_tensor: bool, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(folders / name, name)
    alone = run_schedule(make_config(folder), seed=5)
    if in_one_tensor:  # as on a GPU, whose kernel reads no row with the share 0
        read = sum_choices
        monkeypatch.setattr(experts, "are_one_tensor", lambda _: True)
        monkeypatch.setattr(
            experts,
            "sum_choices",
            lambda rows, shares: read(rows.masked_fill(shares.reshape(-1, 1) == 0, 0.0), shares),
        )
    config = make_config(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    assert largest_difference(alone, run_schedule(config, seed=5)) < 1e-4


def test_layers_that_read_earlier_keys_and_values_are_shared_by_heads_and_not_cut_into_stages(tmp_path: Path) -> None:
    architecture, config = FAMILIES["gemma 4 with experts"]
    changes = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    config = config | changes | {"enable_moe_block": False}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    folder = write_random_weights(tmp_path, seed=3, spread=0.25)
    alone = run_schedule(make_config(folder), seed=1)
    assert largest_difference(alone, run_schedule(make_config(folder, tensor_parallel_size=2), seed=1)) < 1e-4
    with pytest.raises(ValueError, match="cannot be cut into pipeline stages"):
        run_schedule(make_config(folder, pipeline_parallel_size=2), seed=1)
