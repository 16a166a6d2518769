"""KV blocks leave one storage in the canonical form and enter another one where they belong."""

import pytest
import torch

from llmstack_model_runner.steps.block_transfer import BlockTransfer
from llmstack_model_runner.steps.recovery import StepRecovery

SHAPE = (4, 2, 4, 3)


def make_transfer(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(4)]
    caches = [(tensors[0], tensors[1]), (tensors[2], tensors[3])]
    return BlockTransfer(caches, StepRecovery(lambda: None), torch.device("cpu"))


def num_bytes(num_blocks, dtype):
    return num_blocks * 4 * 2 * 4 * 3 * dtype.itemsize


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_arrive_bit_by_bit(dtype, first):
    source, target = make_transfer(dtype, 1), make_transfer(dtype, 2)
    before = [[part.clone() for part in layer] for layer in target._kv_caches]
    data = bytearray(num_bytes(3, dtype))
    source.read([3, 0, 2], memoryview(data))
    target.write([1, 3, 0][first:], memoryview(data), first)
    pairs = [(3, 1), (0, 3), (2, 0)][first:]
    for layer, other, old in zip(source._kv_caches, target._kv_caches, before, strict=True):
        for mine, theirs, unchanged in zip(layer, other, old, strict=True):
            for sent, received in pairs:
                assert torch.equal(bits(mine[sent]), bits(theirs[received]))
            for block in set(range(4)) - {received for _, received in pairs}:
                assert torch.equal(bits(theirs[block]), bits(unchanged[block]))


def test_the_form_is_layer_key_or_value_block_head_slot_dim():
    transfer = make_transfer(torch.float32, 1)
    data = bytearray(num_bytes(2, torch.float32))
    transfer.read([2, 1], memoryview(data))
    expected = torch.stack([part[[2, 1]] for layer in transfer._kv_caches for part in layer])
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).view(expected.shape), expected)


@pytest.mark.parametrize(("block_ids", "size"), [([0], 2), ([0, 1], 1), ([4], 1), ([-1], 1), ([], 0)])
def test_a_block_or_a_size_that_does_not_fit_changes_nothing(block_ids, size):
    transfer = make_transfer(torch.float32, 1)
    before = [part.clone() for layer in transfer._kv_caches for part in layer]
    data = memoryview(bytearray(num_bytes(size, torch.float32)))
    for copy in (transfer.read, transfer.write):
        with pytest.raises(ValueError, match="KV block"):
            copy(block_ids, data)
    assert all(torch.equal(old, new) for old, new in zip(before, sum(transfer._kv_caches, ()), strict=True))
    assert not any(data)


def test_blocks_of_a_failed_row_count_as_written_once_they_are_imported():
    transfer = make_transfer(torch.float32, 1)
    transfer._recovery.unwritten.on_device.update({1: 0, 2: 0})
    transfer.write([1], memoryview(bytearray(num_bytes(1, torch.float32))))
    assert transfer._recovery.unwritten.on_device == {2: 0}


def test_layers_may_have_any_number_of_tensors_of_any_shape():
    shapes = [[(4, 1, 4, 6)], [(4, 2, 4, 3), (4, 2, 4, 2)]]

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        caches = [tuple(torch.randn(shape, generator=generator) for shape in layer) for layer in shapes]
        return BlockTransfer(caches, StepRecovery(lambda: None), torch.device("cpu"))

    source, target = make(1), make(2)
    assert source.sizes == ((24 + 24 + 16) * 4, 0)
    data = memoryview(bytearray(2 * source.sizes[0]))
    source.read([3, 1], data)
    target.write([0, 2], data)
    for layer, other in zip(source._kv_caches, target._kv_caches, strict=True):
        for mine, theirs in zip(layer, other, strict=True):
            assert torch.equal(mine[[3, 1]], theirs[[0, 2]])


def test_a_state_follows_the_blocks_and_counts_as_written():
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        caches, states = ([(torch.randn(4, *shape, generator=generator),)] for shape in ((2, 4, 3), (5, 2)))
        return BlockTransfer(caches, StepRecovery(lambda: None), torch.device("cpu"), states)

    source, target = make(1), make(2)
    block_bytes, state_bytes = source.sizes
    assert (block_bytes, state_bytes) == (96, 40)
    data = memoryview(bytearray(2 * block_bytes + state_bytes))
    source.read([3, 1], data, 2)
    target._recovery.unwritten.states[1] = 0
    before = [tensor.clone() for (tensor,) in target._kv_caches + target._states]
    with pytest.raises(ValueError, match="a KV block does not exist"):
        target.write([0, 2], data, 0, 4)
    with pytest.raises(ValueError, match="3 KV blocks have"):
        target.write([0, 2, 3], data, 0, 1)
    assert all(torch.equal(old, new) for old, (new,) in zip(before, target._kv_caches + target._states, strict=True))
    target.write([0], data, 1, 1)  # the last block, and the state
    assert torch.equal(target._kv_caches[0][0][0], source._kv_caches[0][0][1])
    assert torch.equal(target._states[0][0][1], source._states[0][0][2])
    assert target._recovery.unwritten.states == {}
