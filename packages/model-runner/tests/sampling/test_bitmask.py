"""Token bitmasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, TokenBitmask, apply_token_bitmask
from llmstack_types import SamplingParams, TokenMasks


def packed(allowed: list[set[int]], vocab_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    bits = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for row, token_ids in enumerate(allowed):
        for token_id in token_ids:
            bits[row, token_id // 32] |= np.uint32(1 << (token_id % 32))
    return bits.view(np.int32)


@given(st.integers(1, 100).flatmap(lambda size: st.tuples(
    st.just(size), st.lists(st.sets(st.integers(0, size - 1)), min_size=1, max_size=4), st.booleans()
)))  # fmt: skip
def test_only_tokens_whose_bit_is_set_stay(case: tuple[int, list[set[int]], bool]) -> None:
    vocab_size, allowed, is_reversed = case
    rows = np.arange(len(allowed))[:: -1 if is_reversed else 1].copy() + (1 if is_reversed else 0)
    logits = torch.randn(len(allowed) + int(is_reversed), vocab_size)
    before = logits.clone()
    apply_token_bitmask(logits, TokenBitmask(rows, packed(allowed, vocab_size)))
    for row, token_ids in zip(rows.tolist(), allowed, strict=True):
        kept = [token_id for token_id in range(vocab_size) if logits[row, token_id] == before[row, token_id]]
        assert set(kept) == token_ids
        assert int(logits[row].isneginf().sum()) == vocab_size - len(token_ids)
    others = sorted(set(range(len(logits))) - set(rows.tolist()))
    assert torch.equal(logits[others], before[others])


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    logits = torch.zeros(1, 33)
    apply_token_bitmask(logits, TokenBitmask(np.array([0]), np.full((1, 2), -1, dtype=np.int32)))
    assert torch.equal(logits, torch.zeros(1, 33))


@pytest.mark.parametrize(
    "bits", [np.zeros((1, 1), np.int32), np.zeros((2, 2), np.int32), np.zeros((1, 2), np.int64), np.zeros(2, np.int32)]
)
def test_a_mask_of_another_shape_or_type_is_refused(bits: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> None:
    with pytest.raises(ValueError, match=r"int32 \[1, 2\]"):
        apply_token_bitmask(torch.zeros(1, 33), TokenBitmask(np.array([0]), bits))


def test_the_sampler_applies_the_masks_of_rows_that_have_one() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1, logit_bias={3: 100.0}), SamplingParams(seed=2)]
    rows = make_sampling_rows(params, [[0]] * 3, 40)
    mask = TokenBitmask(np.array([1, 0]), packed([{38}, {5, 6}], 40))
    logits = torch.zeros(3, 40)
    logits[:, 7] = 9.0
    output = Sampler().sample(logits, rows.metadata(np.arange(3), np.zeros(3, dtype=np.int64), mask))
    assert output.token_ids[:2].tolist() == [5, 38]
    assert output.is_good.tolist() == [True, True, True]


def test_masks_find_their_rows_and_places() -> None:
    words = np.arange(8, dtype=np.int32)
    masks = TokenMasks(["c", "a"], bytearray(words.tobytes()))
    bitmask = TokenBitmask.of(masks, ["a", "b", "c"], np.array([1, 2, 3]))
    assert bitmask.rows.tolist() == [3, 4, 5, 0]
    assert bitmask.bits.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_masks_of_some_rows_move_with_them() -> None:
    bits = np.array([[1], [2], [3]], dtype=np.int32)
    bitmask = TokenBitmask(np.array([0, 3, 4]), bits)
    chosen = bitmask.select(np.array([1, 3, 4]))
    assert chosen is not None
    assert chosen.rows.tolist() == [1, 2]
    assert chosen.bits.tolist() == [[2], [3]]
    assert bitmask.select(np.array([1, 2])) is None


def test_masks_that_fit_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="does not sample"):
        TokenBitmask.of(TokenMasks(["x"], bytearray(4)), ["a"], np.array([1]))
    with pytest.raises(ValueError, match="no token masks for 3 places"):
        TokenBitmask.of(TokenMasks(["a"], bytearray(8)), ["a"], np.array([3]))
