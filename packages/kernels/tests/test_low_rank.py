"""Rows get the low-rank update of their own adapter, alone and in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack_kernels.linear import ACTIVATIONS, pack_linear
from llmstack_kernels.low_rank import (
    ExpertRows,
    LowRankAdapter,
    LowRankFactors,
    LowRankSlots,
    activate_rounded,
    add_low_rank_,
    add_low_rank_to_embedding_,
    native,
    reference,
)
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.native.capture import capture
from llmstack_kernels.testing import native_variants, runs_native_kernels

IN_FEATURES, OUT_FEATURES = 50, 90
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CPU = torch.device("cpu")


def make_adapter(seed: int, rank: int, dtype: torch.dtype) -> LowRankAdapter:
    """Of two layers: the first has two parts, of different ranks, and outputs between them without an update."""
    generator = torch.Generator().manual_seed(seed)

    def pair(own_rank: int, first: int, count: int) -> LowRankFactors:
        a = torch.randn(own_rank, IN_FEATURES, generator=generator) * IN_FEATURES**-0.5
        return LowRankFactors(a.to(dtype), torch.randn(own_rank, count, generator=generator).to(dtype), first)

    return LowRankAdapter([[pair(rank, 0, 37), pair(rank + 1, 53, 37)], [pair(1, 0, OUT_FEATURES)]])


def make_slots(dtype: torch.dtype, ranks: tuple[int, ...] = (5, 16, 3)) -> LowRankSlots:
    slots = LowRankSlots(len(ranks) + 1, 2, 64, 20, CPU)
    for slot, rank in enumerate(ranks):
        slots.put(slot, make_adapter(slot, rank, dtype))
    return slots


def expect(x: torch.Tensor, y: torch.Tensor, slots: LowRankSlots, row_slots: list[int], layer: int) -> torch.Tensor:
    out = y.double().clone()
    for row, slot in enumerate(row_slots):
        adapter = slots.adapters[slot] if slot >= 0 else None
        for a, b, first in () if adapter is None else adapter.factors(layer):
            out[row, first : first + b.shape[1]] += x[row].double() @ a.double().T @ b.double()
    return out


def make_rows(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, IN_FEATURES + 3, generator=generator).to(dtype)[:, :IN_FEATURES]
    y = torch.randn(num_rows, OUT_FEATURES, generator=generator).to(dtype)
    return x, y, [(index * 7 + 3) % 5 - 1 for index in range(num_rows)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 23])
def test_each_row_gets_the_update_of_its_slot(num_rows: int, dtype: torch.dtype) -> None:
    slots = make_slots(dtype)
    x, y, row_slots = make_rows(num_rows, dtype)
    assert slots.group(np.array(row_slots))
    for layer in (0, 1):
        for out_dtype in {dtype, torch.float32}:
            out = y.to(out_dtype, copy=True)
            add_low_rank_(out, x, slots, layer)
            expected = expect(x, y, slots, row_slots, layer)
            torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_native_variant_agrees_with_the_reference(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "require_library", lambda: NativeLibrary(variant))
    slots = make_slots(dtype)
    x, y, row_slots = make_rows(23, dtype)
    slots.group(np.array(row_slots))
    for out_dtype in {dtype, torch.float32}:
        out, expected = y.to(out_dtype, copy=True), y.to(out_dtype, copy=True)
        native.add_low_rank_(out, x, slots, 0)
        reference.add_low_rank_(expected, x, slots, 0)
        torch.testing.assert_close(out, expected, atol=TOLERANCES[out_dtype], rtol=TOLERANCES[out_dtype])
    pre = torch.randn(5, 19)
    for name in ACTIVATIONS:
        torch.testing.assert_close(
            native.activate_rounded(pre, name, dtype), reference.activate_rounded(pre, name, dtype)
        )


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_vectors_of_ids_get_the_updates_of_their_slots(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "require_library", lambda: NativeLibrary(variant))
    slots = make_slots(dtype)
    _, y, row_slots = make_rows(23, dtype)
    ids = torch.arange(23) * 7 % IN_FEATURES
    slots.group(np.array(row_slots))
    expected = expect(torch.eye(IN_FEATURES)[ids], y, slots, row_slots, 0)
    for module in (native, reference):
        out = y.clone()
        module.add_low_rank_to_embedding_(out, ids, slots, 0, IN_FEATURES)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    with pytest.raises(ValueError, match="do not fit ids"):
        add_low_rank_to_embedding_(y, ids[1:], slots, 0, IN_FEATURES)


@pytest.mark.parametrize("module", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bit_equal_alone_and_in_any_batch(module: object, dtype: torch.dtype) -> None:
    slots = make_slots(dtype)
    x, y, row_slots = make_rows(40, dtype)
    slots.group(np.array(row_slots))
    whole = y.clone()
    module.add_low_rank_(whole, x, slots, 0)  # type: ignore[attr-defined]
    for start, end in ((0, 1), (39, 40), (3, 17)):
        slots.group(np.array(row_slots[start:end]))
        part = y[start:end].clone()
        module.add_low_rank_(part, x[start:end], slots, 0)  # type: ignore[attr-defined]
        assert torch.equal(part, whole[start:end])


def test_rows_without_an_adapter_keep_their_bits_and_an_empty_batch_has_no_tiles() -> None:
    slots = make_slots(torch.float32)
    x, y, _ = make_rows(6, torch.float32)
    assert slots.group(np.array([-1, 0, -1, -1, 2, -1]))
    out = y.clone()
    add_low_rank_(out, x, slots, 0)
    assert torch.equal(out[[0, 2, 3, 5]], y[[0, 2, 3, 5]])
    assert not torch.equal(out[[1, 4]], y[[1, 4]])
    assert not slots.group(np.array([-1, -1]))
    assert slots.num_tiles.item() == 0
    assert not slots.group(np.array([], dtype=np.int64))


def test_rows_are_sorted_by_slot_and_cut_into_tiles() -> None:
    slots = make_slots(torch.float32)
    slots.group(np.array([2, 0, -1, 2, 2, 2, 2, 0]))
    assert slots.host_rows == [1, 7, 0, 3, 4, 5, 6]
    assert slots.host_tiles == [[0, 0, 2], [2, 2, 4], [2, 6, 1]]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_order_of_rows_follows_each_step(dtype: torch.dtype) -> None:
    slots = make_slots(dtype)
    x, y, row_slots = make_rows(23, dtype)
    for row_slots_of_step in (row_slots, row_slots, row_slots[::-1], row_slots, [-1] * 23, row_slots):
        if row_slots_of_step[0] == -1:  # and so does what is in the slots
            slots.put(1, make_adapter(9, 4, dtype))
        assert slots.group(np.array(row_slots_of_step)) == (max(row_slots_of_step) >= 0)
        out = y.clone()
        add_low_rank_(out, x, slots, 0)
        expected = expect(x, y, slots, row_slots_of_step, 0)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.skipif(not runs_native_kernels(), reason="nothing is captured without native kernels")
def test_a_replayed_call_follows_the_rows_and_adapters_of_its_step() -> None:
    slots = make_slots(torch.float32)
    x, y, row_slots = make_rows(8, torch.float32)
    x = x.contiguous()
    slots.group(np.array(row_slots))
    with capture() as calls:
        add_low_rank_(y, x, slots, 0)
    fresh, other = torch.randn_like(y), [1, -1, -1, 0, 0, 0, 0, 0]
    slots.put(0, make_adapter(9, 2, torch.float32))
    slots.group(np.array(other))
    y.copy_(fresh)
    calls.replay()
    torch.testing.assert_close(y.double(), expect(x, fresh, slots, other, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not runs_native_kernels(), reason="of the native epilogue")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_after_the_update_has_the_bits_of_the_fused_one(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    packed = pack_linear(torch.randn(OUT_FEATURES, IN_FEATURES, generator=generator).to(dtype))
    x = torch.randn(4, IN_FEATURES, generator=generator).to(dtype)
    apart = activate_rounded(packed(x, out_dtype=torch.float32), name, dtype)
    assert torch.equal(apart, packed(x, name))


def test_what_does_not_fit_is_refused() -> None:
    slots = make_slots(torch.float32)
    x, y, _ = make_rows(3, torch.float32)
    with pytest.raises(ValueError, match="do not fit inputs"):
        add_low_rank_(y[:2], x, slots, 0)
    with pytest.raises(ValueError, match="must be float32"):
        add_low_rank_(y.half(), x, slots, 0)
    with pytest.raises(ValueError, match="does not fit slots of rank 20"):
        slots.put(0, make_adapter(0, 20, torch.float32))
    pair = LowRankFactors(torch.zeros(2, 4), torch.zeros(3, 4), 0)
    with pytest.raises(ValueError, match="are no pair"):
        LowRankAdapter([[pair]])
    with pytest.raises(ValueError, match="at most 4"):
        LowRankAdapter([[LowRankFactors(torch.zeros(2, 4), torch.zeros(2, 4), 0)] * 5])


@pytest.mark.parametrize("module", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_experts_get_the_update_of_their_slot_and_expert(module: object, dtype: torch.dtype) -> None:
    num_experts, first_layer = 3, 2
    slots = LowRankSlots(3, first_layer + num_experts + 1, 64, 20, CPU)
    for slot in (0, 2):
        made = [make_adapter(10 * slot + number, 2 + number, dtype).factors(0) for number in range(4)]
        layers = [[], [], *([LowRankFactors(a, b.contiguous(), first) for a, b, first in pairs] for pairs in made)]
        layers[first_layer + 1] = []  # no update of the second expert
        slots.put(slot, LowRankAdapter(layers))
    x, y, _ = make_rows(40, dtype)
    row_slots, experts = np.arange(40) * 7 % 4 - 1, np.arange(40) * 5 % 3
    rows = ExpertRows(slots, row_slots, experts)
    out = y.clone()
    module.add_low_rank_(out, x, rows, first_layer)  # type: ignore[attr-defined]
    expected = y.double().clone()
    for row, (slot, expert) in enumerate(zip(row_slots.tolist(), experts.tolist(), strict=True)):
        for a, b, first in [] if slot < 0 else slots.factors(slot, first_layer + expert):
            expected[row, first : first + b.shape[1]] += x[row].double() @ a.double().T @ b.double()
    assert not torch.equal(expected, y.double())
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for row in (3, 17):
        alone, part = y[row : row + 1].clone(), slice(row, row + 1)
        module.add_low_rank_(alone, x[part], ExpertRows(slots, row_slots[part], experts[part]), first_layer)  # type: ignore[attr-defined]
        assert torch.equal(alone, out[part])


def test_rows_are_ordered_again_after_the_order_could_not_be_sent() -> None:
    slots = LowRankSlots(2, 1, 8, 4, torch.device("cpu"))

    def refuse(_: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            slots.group(np.array([1, -1, 0]), refuse)
    assert slots.group(np.array([1, -1, 0]))
    assert slots.num_tiles.tolist() == [2]
    assert slots.tiles[:2].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert slots.rows[:2].tolist() == [2, 0]


@given(
    num_slots=st.integers(1, 9),
    num_tile_rows=st.sampled_from([4, 16]),
    row_slots=st.lists(st.integers(-1, 8), min_size=1, max_size=200),
)
def test_a_captured_step_starts_kernels_for_all_tiles_that_its_rows_can_make(
    num_slots: int, num_tile_rows: int, row_slots: list[int]
) -> None:
    slots = LowRankSlots(num_slots, 1, 200, 4, torch.device("cpu"))
    slots.num_tile_rows = num_tile_rows
    slots.group(np.minimum(row_slots, num_slots - 1))
    num_tiles = slots.num_launched_tiles
    slots.num_fixed_rows = len(row_slots)
    assert num_tiles <= slots.num_launched_tiles <= min(len(row_slots), num_slots + len(row_slots) // num_tile_rows)
