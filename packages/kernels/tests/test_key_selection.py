"""Selection of keys by an indexer: against float64, ties, and the same choice in any batch, cut and block size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from llmstack_kernels.key_selection import SelectionInputs, native, reference, select_keys
from llmstack_kernels.native import library

Select = Callable[[SelectionInputs], torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = [
    reference.select_keys,
    pytest.param(
        native.select_keys, marks=pytest.mark.skipif(library() is None, reason="the native kernels are not built")
    ),
]


def make_inputs(
    rows: Sequence[tuple[int, int]],
    num_selected: int,
    dtype: torch.dtype = torch.float32,
    *,
    num_heads: int = 5,
    head_dim: int = 32,
    block_size: int = 8,
    is_coarse: bool = False,
) -> SelectionInputs:
    """Rows of so many tokens, with contexts of so many. `is_coarse`: Scores are whole numbers, many of them equal.

    Numbers of a position are the same for all block sizes. Blocks lie apart, with NaN between them.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        if is_coarse:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    num_tokens, most = sum(length for length, _ in rows), max(seq_len for _, seq_len in rows)
    num_blocks = -(-most // block_size)
    query, weights = draw(num_tokens, num_heads, head_dim).to(dtype), draw(num_tokens, num_heads)
    storage = torch.full((len(rows) * num_blocks + 1, 3, block_size, head_dim), torch.nan, dtype=dtype)
    cache, places = storage[:, 1:2], torch.Generator().manual_seed(1)
    tables = torch.randperm(len(rows) * num_blocks, generator=places).view(len(rows), -1)
    for row, (_, seq_len) in enumerate(rows):
        for position, key in enumerate(draw(seq_len, head_dim)):
            cache[tables[row, position // block_size], 0, position % block_size] = key.to(dtype)
    starts = [0, *torch.tensor([length for length, _ in rows]).cumsum(0).tolist()]
    lengths = [seq_len for _, seq_len in rows]
    return SelectionInputs(
        query, weights, cache, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
        tables.int(), num_selected, starts, lengths,
    )  # fmt: skip


def exact(inputs: SelectionInputs) -> list[list[int]]:
    """By float64, token by token and key by key."""
    assert inputs.query_start_loc_list is not None
    assert inputs.seq_lens_list is not None
    found, block_size = [], inputs.key_cache.shape[2]
    for row, seq_len in enumerate(inputs.seq_lens_list):
        start, end = inputs.query_start_loc_list[row : row + 2]
        for token in range(start, end):
            scores = []
            for position in range(seq_len - end + token + 1):
                block = int(inputs.block_tables[row, position // block_size])
                key = inputs.key_cache[block, 0, position % block_size].double()
                products = (inputs.query[token].double() @ key).clamp(min=0)
                scores.append(float(inputs.weights[token].double() @ products))
            best = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
            chosen = sorted(best[: inputs.num_selected])
            found.append(chosen + [0] * (inputs.num_selected - len(chosen)))
    return found


@pytest.mark.parametrize("select", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_selected", [1, 16, 64, 200])
def test_the_highest_scores_are_chosen_in_ascending_order(
    select: Select, dtype: torch.dtype, num_selected: int
) -> None:
    inputs = make_inputs([(1, 150), (9, 70), (3, 3), (1, 17)], num_selected, dtype)
    assert select(inputs).tolist() == exact(inputs)


@pytest.mark.parametrize("select", BACKENDS)
def test_of_equal_scores_the_earlier_keys_are_chosen(select: Select) -> None:
    inputs = make_inputs([(1, 150), (20, 90)], 16, num_heads=2, head_dim=16, is_coarse=True)
    expected = exact(inputs)
    assert select(inputs).tolist() == expected
    equal = inputs._replace(weights=torch.zeros_like(inputs.weights))
    assert select(equal).tolist() == [list(range(16))] * 21


@pytest.mark.parametrize("select", BACKENDS)
def test_a_choice_does_not_depend_on_the_batch_the_cut_and_the_blocks(select: Select) -> None:
    whole = make_inputs([(90, 150), (1, 70)], 16, torch.bfloat16, is_coarse=True)
    expected = select(whole)
    for block_size in (1, 16):
        other = make_inputs([(90, 150), (1, 70)], 16, torch.bfloat16, is_coarse=True, block_size=block_size)
        assert torch.equal(select(other), expected)
    for cut in (1, 7, 23):
        for start in range(0, 90, cut):
            end = min(start + cut, 90)
            part = whole._replace(
                query=whole.query[start:end],
                weights=whole.weights[start:end],
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([60 + end], dtype=torch.int32),
                block_tables=whole.block_tables[:1],
                query_start_loc_list=None,
                seq_lens_list=None,
            )
            assert torch.equal(select(part), expected[start:end]), (cut, start)


@pytest.mark.skipif(library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("num_heads", [1, 6, 7, 64])
def test_native_choices_do_not_depend_on_threads_and_pieces(num_heads: int) -> None:
    inputs = make_inputs([(300, 4500)], 64, num_heads=num_heads, head_dim=16)  # more scores than are kept at once
    expected, num_threads = native.select_keys(inputs), torch.get_num_threads()
    try:
        for count in (2, 5):
            torch.set_num_threads(count)
            assert torch.equal(native.select_keys(inputs), expected)
    finally:
        torch.set_num_threads(num_threads)
    last = inputs._replace(
        query=inputs.query[-1:], weights=inputs.weights[-1:], query_start_loc=torch.tensor([0, 1], dtype=torch.int32)
    )
    assert torch.equal(native.select_keys(last), expected[-1:])


def test_keys_of_8_bits_have_their_scale() -> None:
    inputs = make_inputs([(4, 40)], 16)
    stored = inputs.key_cache.nan_to_num().div(0.5).to(torch.float8_e4m3fn)
    widened = inputs._replace(key_cache=stored.float() * 0.5)
    scaled = inputs._replace(key_cache=stored, key_scale=torch.tensor([0.5]))
    assert select_keys(scaled).tolist() == exact(widened)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.zeros(2, 1, 8, 16)}, "does not fit a cache"),
        ({"weights": torch.zeros(4, 4)}, "weights must be float32"),
        ({"num_selected": 0}, "num_selected must be at least 1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_keys(make_inputs([(4, 20)], 16)._replace(**change))
