"""Blocks arrive where the step says, whole, and in the order of the lists."""

import pytest
import torch

from llmstack_model_runner.memory.block_copies import DirectBlockCopies
from llmstack_types import SchedulerOutput


def storage_of(num_blocks, offset=0.0):
    """Two layers whose every block is filled with its own number."""
    numbers = torch.arange(num_blocks, dtype=torch.float32).view(-1, 1, 1, 1) + offset
    return [
        (numbers.expand(-1, 2, 4, 3).clone() + 100 * layer, -numbers.expand(-1, 2, 4, 3).clone()) for layer in range(2)
    ]


def apply_block_copies(scheduled, storage, host):
    DirectBlockCopies(storage, host).apply(scheduled)


def contents(storage):
    return [int(keys[0, 0, 0]) for keys in storage[0][0]]


def test_blocks_are_the_same_bytes_after_a_round_trip_by_the_host():
    storage, host = storage_of(4), storage_of(3, offset=50)
    expected = [(keys[1].clone(), values[1].clone()) for keys, values in storage]
    apply_block_copies(SchedulerOutput(1, swap_outs=[(1, 2)]), storage, host)
    for keys, values in storage:
        keys[1] = values[1] = 9
    apply_block_copies(SchedulerOutput(2, swap_ins=[(2, 3)]), storage, host)
    for (keys, values), (expected_keys, expected_values) in zip(storage, expected, strict=True):
        assert torch.equal(keys[3], expected_keys)
        assert torch.equal(values[3], expected_values)


def test_swap_outs_come_before_swap_ins_and_copies_last():
    storage, host = storage_of(4), storage_of(2, offset=50)
    scheduled = SchedulerOutput(1, swap_outs=[(0, 0)], swap_ins=[(1, 0), (0, 1)], block_copies=[(0, 2), (1, 3)])
    apply_block_copies(scheduled, storage, host)
    assert contents(storage) == [51, 0, 51, 0]


def test_copies_that_depend_on_each_other_go_one_after_the_other():
    storage = storage_of(4)
    apply_block_copies(SchedulerOutput(1, block_copies=[(0, 1), (1, 2), (3, 1)]), storage, [])
    assert contents(storage) == [0, 3, 0, 3]


@pytest.mark.parametrize("name", ["swap_outs", "swap_ins", "block_copies"])
def test_a_block_that_does_not_exist_is_refused_and_nothing_is_copied(name):
    storage, host = storage_of(3), storage_of(3, offset=50)
    lists = {"swap_outs": [(0, 0)]} | {name: [(0, 1), (0, 3)]}
    with pytest.raises(ValueError, match=name):
        apply_block_copies(SchedulerOutput(1, **lists), storage, host)
    assert contents(host) == [50, 51, 52]
