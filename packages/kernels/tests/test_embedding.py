"""Embeddings are rows of the table, plus what is added."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels import reference
from llmstack_kernels.embedding import embedding, embedding_part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 48, 100])
def test_rows_are_looked_up_and_added_to(dtype: torch.dtype, size: int) -> None:
    table, ids = torch.randn(50, size).to(dtype), torch.randint(0, 50, (700,))
    addend = torch.randn(700, size).to(dtype)
    assert torch.equal(embedding(ids, table), F.embedding(ids, table))
    assert torch.equal(embedding(ids, table, addend), F.embedding(ids, table) + addend)
    assert torch.equal(embedding(ids, table, scale=1.5), F.embedding(ids, table) * 1.5)
    assert torch.equal(embedding(ids, table, addend, 0.3), F.embedding(ids, table) * 0.3 + addend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_a_table_has_zeros_for_ids_outside_of_it(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 40).to(dtype), torch.randint(0, 50, (300,))
    parts = [embedding_part(ids, table[:20], 0, 1.5), embedding_part(ids, table[20:], 20, 1.5)]
    assert torch.equal(parts[0] + parts[1], embedding(ids, table, scale=1.5))
    assert not parts[0][ids >= 20].any()
    assert torch.equal(parts[1], reference.embedding_part(ids, table[20:], 20, 1.5))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ids"):
        embedding(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="addend"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(3, 4))
