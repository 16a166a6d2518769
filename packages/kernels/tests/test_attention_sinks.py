"""A sink takes its share of the softmax of its head, in every backend, and no row's bits depend on the others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch

from llmstack_kernels import paged_attention as paged_attention_module
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.paged_attention import AttentionInputs, cpu, native, paged_attention, reference
from llmstack_kernels.testing import native_variants

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32
# Sinks beside scores of about 1: hardly there, like them, and above them all.
SINKS = torch.tensor([-8.0, -1.0, 0.0, 1.5, 4.0, 30.0])
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
ROWS = [(1, 1), (1, 40), (5, 5), (30, 90), (1, 75)]
Rows = list[tuple[int, int]]


@pytest.fixture(params=["reference", "cpu", *native_variants()])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """`paged_attention` runs PyTorch, or one variant of the native kernels."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        module = {"reference": reference, "cpu": cpu}.get(name, native)
        patch.setattr(paged_attention_module, "implementation", lambda *_: module)
        if module is native:
            library = NativeLibrary(name)
            patch.setattr(native, "require_library", lambda: library)
        yield name


def contexts(rows: Rows, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, ...]]:
    """Queries, keys and values of each row's whole context."""
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [
        tuple(torch.randn(seq_len, count, HEAD_DIM, generator=generator).to(dtype) for count in heads)
        for _, seq_len in rows
    ]


def inputs_of(
    rows: Rows, found: list[tuple[torch.Tensor, ...]], sinks: torch.Tensor, window: int | None
) -> AttentionInputs:
    starts = [0, *accumulate(num_tokens for num_tokens, _ in rows)]
    lengths = [seq_len for _, seq_len in rows]
    width = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    caches = [
        torch.zeros(len(rows) * width, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=found[0][0].dtype) for _ in range(2)
    ]
    for row, context in enumerate(found):
        for cache, values in zip(caches, context[1:], strict=True):
            padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, width * BLOCK_SIZE - len(values)))
            cache[tables[row].long()] = padded.view(width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
    query = torch.cat([own[0][seq_len - count : seq_len] for own, (count, seq_len) in zip(found, rows, strict=True)])
    return AttentionInputs(
        query, *caches, torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), tables,
        HEAD_DIM**-0.5, query_start_loc_list=starts, seq_lens_list=lengths, sliding_window=window, sinks=sinks,
    )  # fmt: skip


def exact(inputs: AttentionInputs, rows: Rows, found: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The definition, in float64: a column of sinks beside the scores, whose weights are then left out."""
    out = torch.empty(inputs.query.shape, dtype=torch.float64)
    bounds = pairwise(inputs.query_start_loc_list or ())
    for (start, end), (count, seq_len), context in zip(bounds, rows, found, strict=True):
        keys, values = (part.double().transpose(0, 1).repeat_interleave(3, 0) for part in context[1:])
        scores = inputs.query[start:end].double().transpose(0, 1) @ keys.mT * HEAD_DIM**-0.5
        distances = torch.arange(seq_len) - torch.arange(seq_len - count, seq_len)[:, None]
        hidden = (distances > 0) | (distances <= -(inputs.sliding_window or seq_len))
        assert inputs.sinks is not None
        column = inputs.sinks.double()[:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores.masked_fill(hidden, -torch.inf), column), -1).softmax(-1)[..., :-1]
        out[start:end] = (weights @ values).transpose(0, 1)
    return out


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_sinks_take_their_share(dtype: torch.dtype, window: int | None, backend: str) -> None:
    found = contexts(ROWS, dtype)
    inputs = inputs_of(ROWS, found, SINKS, window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        paged_attention(inputs).double(), exact(inputs, ROWS, found), atol=tolerance, rtol=tolerance
    )


def test_a_sink_of_minus_infinity_is_none(backend: str) -> None:
    found = contexts(ROWS)
    inputs = inputs_of(ROWS, found, torch.full((NUM_HEADS,), -1e30), None)
    plain = paged_attention(inputs._replace(sinks=None))
    torch.testing.assert_close(paged_attention(inputs), plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_with_sinks_have_the_same_bits_alone(dtype: torch.dtype, backend: str) -> None:
    found = contexts(ROWS, dtype)
    together = paged_attention(inputs_of(ROWS, found, SINKS, 20))
    starts = [0, *accumulate(num_tokens for num_tokens, _ in ROWS)]
    for row, own in enumerate(ROWS):
        alone = paged_attention(inputs_of([own], [found[row]], SINKS, 20))
        assert torch.equal(together[starts[row] : starts[row + 1]], alone)


@pytest.mark.parametrize("variant", native_variants())
def test_a_decode_with_sinks_has_the_bits_of_the_prefill(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = NativeLibrary(variant)
    monkeypatch.setattr(native, "require_library", lambda: library)
    found = contexts([(70, 70)])
    whole = native.paged_attention(inputs_of([(70, 70)], found, SINKS, 20))
    for length in (1, 16, 33, 65, 70):
        context = [tuple(part[:length] for part in found[0])]
        assert torch.equal(native.paged_attention(inputs_of([(1, length)], context, SINKS, 20))[0], whole[length - 1])


def test_sinks_of_other_heads_are_refused() -> None:
    inputs = inputs_of(ROWS[:1], contexts(ROWS[:1]), SINKS[:3], None)
    with pytest.raises(ValueError, match="sinks of shape"):
        paged_attention(inputs)
