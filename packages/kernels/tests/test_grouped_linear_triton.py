"""Experts on a GPU: rows are sorted and cut into tiles on the device, and each row's bits are its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.graph_safety import no_host_synchronisation
from llmstack_kernels.grouped_linear import group_rows as group_rows_here
from llmstack_kernels.grouped_linear import reference
from llmstack_kernels.grouped_linear import triton as kernels
from llmstack_kernels.linear import QUANTIZATIONS, BlockWeight, StoredWeight, quantize

# What Triton's own interpreter does to the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(
    num_tokens: int, num_choices: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, the experts' weights, and chosen experts, of which the second has none."""
    generator = torch.Generator().manual_seed(0)
    num_experts, _, in_features = shape
    x = torch.randn(num_tokens, in_features, generator=generator)
    weights = torch.randn(shape, generator=generator) * in_features**-0.5
    others = torch.tensor([expert for expert in range(num_experts) if expert != 1])
    scores = torch.rand(num_tokens, num_experts - 1, generator=generator)
    expert_ids = others[scores.argsort(1)[:, :num_choices]]
    return x.to(device, dtype), weights.to(device, dtype), expert_ids.to(device)


def exact(x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, activation: str) -> torch.Tensor:
    rows_per_input = expert_ids.numel() // x.shape[0]
    out = torch.stack(
        [weights[e].double() @ x[i // rows_per_input].double() for i, e in enumerate(expert_ids.view(-1))]
    )
    if activation == "silu_and_mul":
        gate, gated = out.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * gated
    return out


@pytest.mark.parametrize("is_sorting", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 3), (6, 2), (40, 5), (64, 7), (200, 3)])
def test_tiles_hold_each_experts_rows_once(
    num_rows: int, num_experts: int, is_sorting: bool, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_sorting:
        monkeypatch.setattr(kernels, "_MAX_SORTED_ROWS", 0)
    expert_ids = torch.randint(num_experts, (num_rows, 1), device=triton_device)
    expected = reference.group_rows(expert_ids, num_experts)
    found = kernels.group_rows(expert_ids, num_experts)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.starts, expected.starts)
    assert found.tile_experts is not None
    assert found.tile_starts is not None
    seen = []
    for expert, start in zip(found.tile_experts.tolist(), found.tile_starts.tolist(), strict=True):
        if expert < num_experts:
            end = min(start + found.tile_rows, int(found.starts[expert + 1]))
            assert start < end
            seen += [(expert, place) for place in range(start, end)]
    bounds = found.starts.tolist()
    assert seen == [(e, place) for e in range(num_experts) for place in range(bounds[e], bounds[e + 1])]


@pytest.mark.parametrize("activation", ["none", "silu_and_mul"])
@pytest.mark.parametrize(("num_tokens", "shape"), [(1, (3, 64, 64)), (11, (4, 70, 100))], ids=str)
def test_rows_go_through_their_experts(
    num_tokens: int, shape: tuple[int, int, int], activation: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weights, expert_ids = make(num_tokens, 2, shape, triton_dtype, triton_device)
    groups = kernels.group_rows(expert_ids, shape[0])
    experts = kernels.pack_experts(weights)
    tolerance = TOLERANCE[triton_dtype]
    for inputs in (x, x.repeat_interleave(2, 0)):
        out = experts(inputs, groups, activation)
        assert out.dtype == triton_dtype
        expected = exact(inputs, weights, expert_ids, activation)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_quantized_experts_are_computed_with_as_they_stand(
    scheme: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weights, expert_ids = make(5, 2, (3, 64, 150), triton_dtype, triton_device)
    groups = kernels.group_rows(expert_ids, 3)
    rounded = torch.stack([quantize(weight, scheme).dequantize(torch.float64) for weight in weights])
    out = kernels.pack_experts(weights, scheme)(x, groups)
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out.double(), exact(x, rounded, expert_ids, "none"), atol=tolerance, rtol=tolerance)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
STORED: dict[str, Callable[[torch.Tensor], StoredWeight]] = {
    "mxfp4": lambda numbers: StoredWeight("table4", numbers % 16, torch.full((64, 5), 0.125), 32, table=E2M1),
    "int4_zeros": lambda numbers: StoredWeight("int4", numbers % 16, torch.full((64, 5), 0.1), 32),
    "int8": lambda numbers: StoredWeight("int8", numbers, torch.full((64, 1), 0.01), 150),
    "fp8": lambda numbers: StoredWeight("fp8", numbers % 112, torch.full((64, 1), 0.01), 150),
    "fp8_block": lambda numbers: StoredWeight("fp8", numbers % 112, torch.full((64, 2), 0.01), 128),
}


@pytest.mark.parametrize("weight_format", STORED)
def test_stored_experts_are_computed_with_as_they_stand(weight_format: str, triton_device: str) -> None:
    x, _, expert_ids = make(5, 2, (3, 64, 150), torch.float16, triton_device)
    numbers = torch.randint(256, (3, 64, 150), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    weights = [STORED[weight_format](own) for own in numbers]
    packed = kernels.pack_stored_experts(weights, torch.float16, torch.device(triton_device))
    assert packed is not None
    assert packed._format == weight_format
    exact_weights = torch.stack([weight.dequantize(torch.float64) for weight in weights]).to(triton_device)
    expected = exact(x, exact_weights, expert_ids, "none")
    found = packed(x, kernels.group_rows(expert_ids, 3)).double()
    assert (found - expected).abs().max() <= TOLERANCE[torch.float16] * expected.abs().max()


def test_experts_of_several_formats_are_not_packed(triton_device: str) -> None:
    numbers, device = torch.zeros((64, 150), dtype=torch.uint8), torch.device(triton_device)
    made = {name: build(numbers) for name, build in STORED.items()}
    order = torch.arange(150).flip(0)
    ordered = StoredWeight("int4", numbers, torch.ones(64, 5), 32, order=order)
    other_table = StoredWeight("table4", numbers, torch.ones(64, 5), 32, table=torch.arange(16.0))
    assert kernels.pack_stored_experts([made["int8"], made["fp8"]], torch.float16, device) is None
    assert kernels.pack_stored_experts([made["int8"], made["int8"].rows(slice(0, 32))], torch.float16, device) is None
    assert kernels.pack_stored_experts([ordered], torch.float16, device) is None
    assert kernels.pack_stored_experts([other_table], torch.float16, device) is None
    assert kernels.pack_stored_experts([made["int8"]], torch.float32, device) is None


@pytest.mark.parametrize(("num_read", "has_float_zeros"), [(3, False), (1, True)])
def test_numbers_of_blocks_are_read_one_expert_at_a_time(
    num_read: int, has_float_zeros: bool, triton_device: str
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    numbers = torch.randint(256, (64, 128), generator=torch.Generator().manual_seed(0)).to(torch.uint8) & 15
    zeros = torch.ones(64, 4) if has_float_zeros else None  # no kernel reads these

    def read(blocks: torch.Tensor) -> StoredWeight:
        assert sum(numbers() is not None for numbers in alive) <= 1  # that of the expert before
        stored = StoredWeight("int4", numbers.clone(), torch.ones(64, 4), 32, zeros=zeros)
        alive.append(weakref.ref(stored.numbers))
        return stored

    blocks = torch.zeros((64, 4, 18), dtype=torch.uint8)
    weights = [BlockWeight("Q4_0", (blocks,), read) for _ in range(3)]
    packed = kernels.pack_stored_experts(weights, torch.float16, torch.device(triton_device))
    assert (packed is None) == has_float_zeros
    assert len(alive) == num_read


def test_a_row_is_bit_equal_in_any_batch(triton_dtype: torch.dtype, triton_device: str) -> None:
    x, weights, expert_ids = make(70, 2, (3, 40, 70), triton_dtype, triton_device)
    experts = kernels.pack_experts(weights)
    whole = experts(x, kernels.group_rows(expert_ids, 3), "silu_and_mul").view(70, 2, 20)
    for start, end in ((0, 1), (69, 70), (5, 25)):
        part = experts(x[start:end], kernels.group_rows(expert_ids[start:end], 3), "silu_and_mul")
        assert torch.equal(part.view(end - start, 2, 20), whole[start:end])


def test_rows_without_an_expert_are_neither_computed_nor_read(triton_device: str) -> None:
    x, weights, expert_ids = make(9, 2, (4, 40, 70), torch.float32, triton_device)
    shares = torch.rand(9, 2, device=triton_device)
    experts = kernels.pack_experts(weights)
    expected = kernels.sum_choices(
        experts(x, kernels.group_rows(expert_ids, 4)), shares.masked_fill(expert_ids == 2, 0.0)
    )
    groups = kernels.group_rows(torch.where(expert_ids == 2, 4, expert_ids), 4)
    assert int(groups.starts[-1]) == int((expert_ids != 2).sum()) < 18
    rows = experts(x, groups)
    rows[expert_ids.view(-1) == 2] = float("nan")
    assert torch.equal(kernels.sum_choices(rows, shares.masked_fill(expert_ids == 2, 0.0)), expected)


def test_choices_are_summed_by_their_shares_one_after_the_other(triton_dtype: torch.dtype, triton_device: str) -> None:
    rows = torch.randn(7 * 3, 100, device=triton_device).to(triton_dtype)
    shares = torch.rand(7, 3, device=triton_device)
    found = kernels.sum_choices(rows, shares)
    expected = (rows.view(7, 3, 100).double() * shares.double()[:, :, None]).sum(1)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[triton_dtype], rtol=TOLERANCE[triton_dtype])
    assert torch.equal(kernels.sum_choices(rows[3:6], shares[1:2]), found[1:2])


def test_every_row_is_written_and_the_host_never_waits(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, expert_ids = make(9, 2, (4, 40, 70), torch.float32, triton_device)
    experts = kernels.pack_experts(weights)
    expected = experts(x, kernels.group_rows(expert_ids, 4))
    make_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *sizes: object, **options: object) -> torch.Tensor:
        out: torch.Tensor = make_empty(self, *sizes, **options)  # type: ignore[call-overload]  # passed on as it came
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    with no_host_synchronisation():
        found = experts(x, kernels.group_rows(expert_ids, 4))
    assert torch.equal(found, expected)


def test_groups_of_another_backend_are_refused(triton_device: str) -> None:
    x, weights, expert_ids = make(3, 2, (3, 8, 16), torch.float32, triton_device)
    groups = reference.group_rows(expert_ids, 3)
    with pytest.raises(ValueError, match="another device"):
        kernels.pack_experts(weights)(x, groups)
    assert group_rows_here(expert_ids, 3).num_experts == 3


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_on_a_card_rows_are_bit_equal_whatever_their_number(scheme: str | None, triton_device: str) -> None:
    x, weights, expert_ids = make(2000, 8, (32, 1536, 2048), torch.bfloat16, triton_device)
    experts = kernels.pack_experts(weights, scheme)
    whole = experts(x, kernels.group_rows(expert_ids, 32), "silu_and_mul")
    for count in (1, 2, 7, 64, 256):
        part = experts(x[:count], kernels.group_rows(expert_ids[:count], 32), "silu_and_mul")
        assert torch.equal(part, whole[: 8 * count])
