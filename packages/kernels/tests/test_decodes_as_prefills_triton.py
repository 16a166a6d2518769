"""Where it is asked for, a token that is decoded has the bits that it has within a prompt, whatever is beside it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.paged_attention import AttentionInputs, triton

# Bounds of loops that are not constants: Triton's interpreter reads them out of arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SEQ_LEN = 4, 2, 16, 16, 140


def attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    rows: list[tuple[int, int]],
    *,
    decodes_as_prefills: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    """Rows of (tokens, context) over the same blocks."""
    starts = [0]
    for num_tokens, _ in rows:
        starts.append(starts[-1] + num_tokens)
    num_blocks = caches[0].shape[0]
    device = query.device
    return triton.paged_attention(
        AttentionInputs(
            query,
            *caches,
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32, device=device),
            torch.arange(num_blocks, dtype=torch.int32, device=device).expand(len(rows), num_blocks).contiguous(),
            HEAD_DIM**-0.5,
            max_query_len=max(num_tokens for num_tokens, _ in rows),
            sliding_window=sliding_window,
            decodes_as_prefills=decodes_as_prefills,
        )
    )


@pytest.fixture
def operands(triton_device: str, triton_dtype: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    num_blocks = -(-SEQ_LEN // BLOCK_SIZE)
    query = torch.randn(SEQ_LEN, NUM_HEADS, HEAD_DIM, device=triton_device).to(triton_dtype)
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(shape, device=triton_device).to(triton_dtype) for _ in range(2))
    return query, (keys, values)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_a_decode_has_the_bits_of_a_prompt(
    operands: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], sliding_window: int | None
) -> None:
    query, caches = operands
    options = {"decodes_as_prefills": True, "sliding_window": sliding_window}
    whole = attend(query, caches, [(SEQ_LEN, SEQ_LEN)], **options)  # type: ignore[arg-type]  # by name
    ends = [1, 2, 64, 65, 100, SEQ_LEN]
    chosen = torch.tensor([end - 1 for end in ends], device=query.device)
    decoded = attend(query[chosen], caches, [(1, end) for end in ends], **options)  # type: ignore[arg-type]
    assert torch.equal(decoded, whole[chosen])
    tokens = torch.cat([chosen[:1], torch.arange(70, 75, device=query.device), chosen[3:4]])
    mixed = attend(query[tokens], caches, [(1, 1), (5, 75), (1, 65)], **options)  # type: ignore[arg-type]
    assert torch.equal(mixed, whole[tokens])


def test_it_agrees_with_the_splits_that_decodes_are_otherwise_cut_into(
    operands: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    query, caches = operands
    rows = [(1, 33), (1, SEQ_LEN)]
    as_prefill, split = (
        attend(query[:2], caches, rows, decodes_as_prefills=is_asked, sliding_window=None) for is_asked in (True, False)
    )
    torch.testing.assert_close(as_prefill, split, atol=5e-3, rtol=5e-3)
