"""Embeddings are rows of the table, plus what is added."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels import reference
from llmstack_kernels.dispatch import ENVIRONMENT_VARIABLE
from llmstack_kernels.embedding import (
    can_look_up_blocks,
    embedding,
    embedding_of_blocks,
    embedding_of_packed,
    embedding_part,
    table_of,
)
from llmstack_kernels.linear import BLOCK_TYPES, BlockWeight, concatenate_linears, pack_linear, packing_version


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


@pytest.mark.skipif(not packing_version("cpu"), reason="needs the native kernels, which pack weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 48, 101])
def test_rows_of_a_packed_output_head_are_those_of_its_table(dtype: torch.dtype, size: int) -> None:
    table, ids = torch.randn(150, size).to(dtype), torch.randint(0, 150, (700,))
    addend = torch.randn(700, size).to(dtype)
    weight = table_of(pack_linear(table.clone(), torch.randn(150).to(dtype)))
    assert weight is not None
    assert torch.equal(embedding_of_packed(ids, weight), embedding(ids, table))
    assert torch.equal(embedding_of_packed(ids, weight, addend), embedding(ids, table, addend))
    assert torch.equal(embedding_of_packed(ids, weight, addend, 0.3), embedding(ids, table, addend, 0.3))
    assert torch.equal(embedding_of_packed(ids[:1], weight, scale=1.5), embedding(ids[:1], table, scale=1.5))
    with pytest.raises(ValueError, match="addend"):
        embedding_of_packed(ids, weight, addend[1:])


def blocks_of(block_type: str, num_rows: int, num_blocks: int) -> BlockWeight:
    block = BLOCK_TYPES[block_type]
    blocks = torch.randint(0, 256, (num_rows, num_blocks, block.num_bytes), dtype=torch.uint8)
    for start in block.scales:
        scales = torch.rand(num_rows, num_blocks).half() + 0.01
        blocks.view(torch.int16)[..., start // 2] = scales.view(torch.int16)
    return BlockWeight(block_type, (blocks,), lambda _: pytest.fail("native code widens them"))


@pytest.mark.skipif(not can_look_up_blocks(), reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_rows_of_blocks_are_those_of_the_widened_table(block_type: str, dtype: torch.dtype) -> None:
    weight = blocks_of(block_type, 30, 3).rows(torch.randperm(30))
    table, ids = weight.dequantize(dtype), torch.randint(0, 30, (300,))
    size, blocks = table.shape[1], weight.copied()
    addend = torch.randn(300, size).to(dtype)
    assert torch.equal(embedding_of_blocks(ids, blocks, dtype), embedding(ids, table))
    assert torch.equal(embedding_of_blocks(ids, blocks, dtype, addend), embedding(ids, table, addend))
    assert torch.equal(embedding_of_blocks(ids, blocks, dtype, addend, 0.3), embedding(ids, table, addend, 0.3))
    assert torch.equal(embedding_of_blocks(ids[:1], blocks, dtype, None, 1.5), embedding(ids[:1], table, scale=1.5))
    with pytest.raises(ValueError, match="addend"):
        embedding_of_blocks(ids, blocks, dtype, addend[1:])
    with pytest.raises(ValueError, match="in order"):
        embedding_of_blocks(ids, weight, dtype)


def test_a_reference_looks_up_in_no_packed_head() -> None:
    code = (
        "import torch\n"
        "from llmstack_kernels.embedding import table_of\n"
        "from llmstack_kernels.linear import pack_linear\n"
        "print(table_of(pack_linear(torch.randn(64, 64))))"
    )
    environment = os.environ | {ENVIRONMENT_VARIABLE: "embedding=reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_a_head_that_is_rounded_or_in_parts_has_no_table() -> None:
    head = pack_linear(torch.randn(64, 64), None, "int8")
    assert table_of(head) is None
    assert table_of(concatenate_linears([pack_linear(torch.randn(64, 64)), head])) is None


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ids"):
        embedding(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="addend"):
        embedding(torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(3, 4))
