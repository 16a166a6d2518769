"""Sampling by Triton agrees with its reference token for token, for any parameters and any neighbouring rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from kernel_helpers.sampling_rows import LARGE, MIXED, make_logits, make_rows, make_state, pack_bits

from llmstack_kernels.sample_tokens import RowParameters, reference
from llmstack_kernels.sample_tokens import triton as kernels

# The interpreter's own: bounds of loops are arrays of one number to it.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

Sampled = tuple[list[int], list[bool], list[int], list[list[int]] | None]


def sample(
    module: Any,
    logits: torch.Tensor,
    parameters: Sequence[RowParameters],
    *,
    num_outputs: int = 0,
    counts: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    is_counting: bool = True,
) -> Sampled:
    device = str(logits.device)
    counts = None if counts is None else counts.to(device, copy=True)
    state = make_state(parameters, device, num_outputs, counts)
    has_random = any(one.temperature > 0 for one in parameters)
    bitmask = None if bitmask is None else bitmask.to(device)
    rows = make_rows(len(parameters), device)
    before = logits.clone()
    token_ids, is_good = module.sample_tokens(logits, rows, state, bitmask, has_random, counts is not None, is_counting)
    assert torch.equal(logits.isnan(), before.isnan())
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    found = None if state.token_counts is None else state.token_counts.tolist()
    return token_ids.tolist(), is_good.tolist(), state.num_outputs.tolist(), found


def check(logits: torch.Tensor, parameters: Sequence[RowParameters], **options: Any) -> Sampled:
    """What both found."""
    expected = sample(reference, logits, parameters, **options)
    assert sample(kernels, logits, parameters, **options) == expected
    return expected


@pytest.mark.parametrize("vocab_size", [33, pytest.param(1000, marks=pytest.mark.full), 2500])
def test_small_sets_agree(vocab_size: int, triton_device: str) -> None:
    check(make_logits(len(MIXED), vocab_size).to(triton_device), MIXED)


@pytest.mark.parametrize("rows", [slice(0, 8, 2), pytest.param(slice(1, 8, 2), marks=pytest.mark.full)], ids=str)
def test_large_sets_agree(rows: slice, triton_device: str) -> None:
    check(make_logits(4, 1700, scale=1.0).to(triton_device), LARGE[rows], num_outputs=3)


def test_ties_at_the_edge_of_a_set_go_to_lower_ids(triton_device: str) -> None:
    logits = (make_logits(5, 1100, scale=1.5) * 2).round().div(2).to(triton_device)
    few = [RowParameters(temperature=1.0, top_k=7, seed=1), RowParameters(temperature=1.0, top_p=0.3, seed=2)]
    check(logits, [*few, LARGE[1], *LARGE[3:5]], num_outputs=1)


def test_all_tokens_may_be_equal(triton_device: str) -> None:
    parameters = [
        RowParameters(temperature=1.0, seed=1),
        RowParameters(temperature=1.0, top_k=3, seed=2),
        RowParameters(temperature=1.0, top_p=0.5, seed=3),
        RowParameters(temperature=1.0, min_p=1.0, seed=4),
        RowParameters(),
    ]
    check(torch.full((5, 700), -3.25, device=triton_device), parameters)


def test_any_type_of_logits_and_rows_of_a_wider_tensor(triton_dtype: torch.dtype, triton_device: str) -> None:
    wide = make_logits(3, 1030).to(triton_dtype).to(triton_device)
    check(wide[:, 3:1003], MIXED[:3])


@pytest.mark.parametrize("temperature", [1.2e-38, 50.0])
def test_temperatures_may_be_extreme(temperature: float, triton_device: str) -> None:
    parameters = [RowParameters(temperature=temperature, top_p=top_p, seed=3) for top_p in (1.0, 0.9)]
    check(make_logits(2, 800, scale=30.0).to(triton_device), parameters)


def test_masks_ending_tokens_and_penalties_agree(triton_device: str) -> None:
    vocab_size = 150
    generator = torch.Generator().manual_seed(3)
    is_allowed = torch.rand(6, vocab_size, generator=generator) < 0.5
    counts = torch.randint(0, 4, (7, vocab_size), generator=generator, dtype=torch.int32)
    logits = make_logits(6, vocab_size, scale=0.5)
    endings = logits.masked_fill(~is_allowed, -torch.inf).topk(3, dim=-1).indices.tolist()
    parameters = [
        RowParameters(min_tokens=3, ending_token_ids=endings[0]),
        RowParameters(temperature=0.5, min_tokens=3, ending_token_ids=endings[1], frequency=0.5),
        RowParameters(repetition=1.7, presence=-0.3),
        RowParameters(temperature=0.5, top_p=0.8, repetition=0.8, frequency=-1.0),
        RowParameters(temperature=1.0, top_k=4),
        RowParameters(min_tokens=2, ending_token_ids=endings[5]),
    ]
    token_ids, *_ = check(
        logits.to(triton_device), parameters, num_outputs=2, counts=counts, bitmask=pack_bits(is_allowed)
    )
    assert all(is_allowed[row, token_id] for row, token_id in enumerate(token_ids))
    assert token_ids[0] not in endings[0]
    assert token_ids[5] == endings[5][0]


def test_bad_rows_are_reported(triton_device: str) -> None:
    logits = make_logits(6, 300)
    logits[0, 299] = logits[1, 5] = torch.nan
    logits[2, 7] = logits[3, 7] = torch.inf
    is_allowed = torch.ones(6, 300, dtype=torch.bool)
    is_allowed[4] = False
    is_allowed[1, 5] = is_allowed[3, 7] = False  # hides infinity, but not what is no number
    parameters = [RowParameters(), *MIXED[1:5], RowParameters()]
    _, is_good, num_outputs, _ = check(logits.to(triton_device), parameters, bitmask=pack_bits(is_allowed))
    assert is_good == [False, False, False, True, False, True]
    assert num_outputs == [1] * 6 + [0]


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 500), (33, 9001)])
def test_the_most_likely_token_is_found_in_any_number_of_rows(
    num_rows: int, vocab_size: int, triton_device: str
) -> None:
    logits = make_logits(num_rows, vocab_size).to(triton_device)
    token_ids, *_ = check(logits, [RowParameters()] * num_rows)
    assert token_ids == logits.argmax(dim=-1).tolist()


def test_nothing_is_counted_unless_asked(triton_device: str) -> None:
    counts = torch.zeros(3, 90, dtype=torch.int32)
    parameters = [RowParameters(presence=1.0), RowParameters(temperature=1.0, presence=1.0)]
    *_, num_outputs, found = check(
        make_logits(2, 90).to(triton_device), parameters, counts=counts, is_counting=False, num_outputs=4
    )
    assert num_outputs == [4] * 3
    assert found == counts.tolist()


def test_a_row_is_the_same_alone_and_among_others(triton_device: str) -> None:
    parameters = [MIXED[1], MIXED[3], LARGE[3]]
    logits = make_logits(3, 900, scale=1.0).to(triton_device)
    together = sample(kernels, logits, parameters)[0]
    rotated = sample(kernels, logits.flip(0), parameters[::-1])[0]
    assert together == rotated[::-1]
    assert together[2:] == sample(kernels, logits[2:], parameters[2:])[0]


def test_there_may_be_no_rows(triton_device: str) -> None:
    assert sample(kernels, make_logits(0, 40).to(triton_device), [])[:2] == ([], [])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_many_rows_agree(seed: int, triton_device: str) -> None:
    """Rounding may move a draw to the neighbouring token: of 128 rows one may differ."""
    parameters = [
        RowParameters(
            temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p, seed=100 * seed + place
        )
        for place, one in enumerate([*MIXED, *LARGE] * 8)
    ]
    logits = make_logits(len(parameters), 1300, seed=seed, scale=1.0).to(triton_device)
    expected, found = (sample(module, logits, parameters)[0] for module in (reference, kernels))
    assert sum(one != other for one, other in zip(expected, found, strict=True)) <= 1
