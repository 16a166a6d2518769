"""Keys and values arrive in their slots, and a block that another request owned is clean."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from llmstack_kernels import reference
from llmstack_kernels.reshape_and_cache import native, reshape_and_cache


def test_tokens_are_written_to_their_slots_and_nothing_else_changes() -> None:
    key_cache, value_cache = torch.full((5, 2, 4, 3), -1.0), torch.full((5, 2, 4, 3), -2.0)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([2 * 4 + 3, 4 * 4 + 1, 1]))
    for token, (block, offset) in enumerate([(2, 3), (4, 1), (0, 1)]):
        assert torch.equal(key_cache[block, :, offset], key[token])
        assert torch.equal(value_cache[block, :, offset], value[token])
    assert int((key_cache == -1).sum()) == key_cache.numel() - key.numel()


@pytest.mark.parametrize("backend", [native, reference])
def test_blocks_may_lie_apart(backend: ModuleType) -> None:
    layers = torch.full((5, 3, 2, 4, 16), -1.0)
    key, value, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([2 * 4 + 3, 4 * 4 + 1, 4])
    backend.reshape_and_cache(key, value, layers[:, 0], layers[:, 2], slots)
    whole = torch.full((5, 2, 4, 16), -1.0), torch.full((5, 2, 4, 16), -1.0)
    backend.reshape_and_cache(key, value, *whole, slots)
    assert torch.equal(layers[:, 0], whole[0])
    assert torch.equal(layers[:, 2], whole[1])
    assert (layers[:, 1] == -1).all()


def test_the_slots_of_a_block_must_lie_together() -> None:
    cache, key = torch.zeros(2, 4, 2, 16).transpose(1, 2), torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="contiguous"):
        native.reshape_and_cache(key, key, cache, cache, torch.tensor([0]))


def test_the_first_token_of_a_block_clears_what_an_earlier_owner_left() -> None:
    cache = torch.full((3, 1, 4, 2), torch.nan)
    key = torch.ones(3, 1, 2)
    reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([4, 5, 0]))
    assert torch.equal(cache[1, 0, :, 0], torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert torch.equal(cache[0, 0, :, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert cache[2].isnan().all()


def test_values_are_converted_to_the_type_of_the_storage() -> None:
    cache = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16)
    reshape_and_cache(torch.ones(1, 1, 2), torch.ones(1, 1, 2), cache, cache.clone(), torch.tensor([1]))
    assert cache[0, 0, 1].tolist() == [1.0, 1.0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache, key = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="key and value"):
        reshape_and_cache(key, key[:, :1], cache, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="caches"):
        reshape_and_cache(key[:, :1], key[:, :1], cache, cache, torch.tensor([0]))


@pytest.mark.parametrize("backend", [native, reference])
def test_a_token_without_a_slot_is_not_written(backend: ModuleType) -> None:
    cache = torch.zeros(2, 1, 4, 2)
    key = torch.ones(3, 1, 2)
    backend.reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([-1, 5, -1]))
    assert cache.nonzero().tolist() == [[1, 0, 1, 0], [1, 0, 1, 1]]


def test_eight_bits_hold_what_is_divided_by_the_scale_of_its_head() -> None:
    key_cache = torch.zeros(1, 2, 4, 2, dtype=torch.float8_e4m3fn)
    value_cache = key_cache.clone()
    key = torch.tensor([[[1.0, -3.0], [2.0, 1e6]]])
    scales = torch.tensor([0.5, 4.0]), torch.tensor([1.0, 2.0])
    reshape_and_cache(key, key, key_cache, value_cache, torch.tensor([1]), *scales)
    assert key_cache[0, :, 1].float().tolist() == [[2.0, -6.0], [0.5, 448.0]]
    assert value_cache[0, :, 1].float().tolist() == [[1.0, -3.0], [1.0, 448.0]]
    with pytest.raises(ValueError, match="key_scale"):
        reshape_and_cache(key, key, key_cache, value_cache, torch.tensor([1]))
    with pytest.raises(ValueError, match="value_scale"):
        reshape_and_cache(key, key, key_cache, value_cache, torch.tensor([1]), scales[0], scales[1][:1])


@pytest.mark.parametrize("slots", [torch.tensor([]), torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32)])
def test_slots_of_another_type_or_number_are_refused_before_anything_is_written(slots: torch.Tensor):
    cache = torch.zeros(2, 2, 4, 16)
    with pytest.raises(ValueError, match="slot_mapping must be int64"):
        reshape_and_cache(torch.ones(1, 2, 16), torch.ones(1, 2, 16), cache, cache, slots)
    assert not cache.any()
