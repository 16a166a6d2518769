"""Each rank has its part of heads, features, vocabulary and layers, and reads no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llmstack_model_runner.layers.sharding import Sharding, sharded
from llmstack_model_runner.layers.weight_slot import WeightPart
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.testing import write_random_weights
from llmstack_model_runner.weights import load_weights

NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class CountedReads:
    """A tensor of which every part that is read is counted."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.num_read = 0
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._tensor[index]
        self.num_read += part.numel()
        return part

    def read(self, part: WeightPart | None) -> torch.Tensor:
        return self[...] if part is None else part.read(self)


def test_shares_cover_everything_once_and_differ_by_one_at_most() -> None:
    shares = [Sharding(rank, 3).share(97) for rank in range(3)]
    assert [number for share in shares for number in share] == list(range(97))
    assert Sharding(0, 3).widths(97) == [len(share) for share in shares] == [32, 32, 33]
    layers = [Sharding(stage=stage, num_stages=3).layers(5) for stage in range(3)]
    assert [list(run) for run in layers] == [[0], [1, 2], [3, 4]]


def test_kv_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    assert [Sharding(rank, 4).heads(8, 2) for rank in range(4)] == [
        (range(2), range(1)),
        (range(2, 4), range(1)),
        (range(4, 6), range(1, 2)),
        (range(6, 8), range(1, 2)),
    ]
    assert Sharding(1, 2).heads(8, 4) == (range(4, 8), range(2, 4))


def test_what_cannot_be_shared_out_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3, and the model's 8 attention heads"):
        Sharding(0, 3).heads(8, 8)
    with pytest.raises(ValueError, match="tensor_parallel_size is 4, which neither divides the model's 6 key-value"):
        Sharding(0, 4).heads(12, 6)
    with pytest.raises(ValueError, match="pipeline_parallel_size is 3, but the model has only 2 layers"):
        Sharding(num_stages=3).layers(2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part_of_each_tensor_and_nothing_else(size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    write_random_weights(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    matrices = {name for name, tensor in tensors.items() if tensor.dim() == 2}
    total = dict.fromkeys(matrices, 0)
    for rank in range(size):
        counted = {name: CountedReads(tensor) for name, tensor in tensors.items()}
        with sharded(Sharding(rank, size)):
            model = load_model_class(NEOX["architectures"][0])(NEOX, torch.float32, torch.device("cpu"))
        model.load_weights(counted.items())
        for name in matrices:
            assert counted[name].num_read == tensors[name].numel() // size
            total[name] += counted[name].num_read
    assert total == {name: tensors[name].numel() for name in matrices}


def test_a_stage_reads_its_layers_and_misses_no_tensor_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    write_random_weights(tmp_path)
    with sharded(Sharding(stage=0, num_stages=2)):
        model = load_model_class(NEOX["architectures"][0])(NEOX, torch.float32, torch.device("cpu"))
    slots = model.slots()
    assert sum(slot.num_elements for name, slot in slots.items() if ".layers.1." in name or "embed_out" in name) == 0
    assert all(slot.num_elements for name, slot in slots.items() if ".layers.0." in name or "embed_in" in name)
    assert model.kv_spec.num_layers == 1
    load_weights(model, tmp_path)  # every tensor of the file is known
