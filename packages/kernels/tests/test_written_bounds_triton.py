"""The small Triton kernels write all of their outputs, and nothing beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.activation import triton as activation
from llmstack_kernels.argmax import triton as argmax
from llmstack_kernels.embedding import triton as embedding
from llmstack_kernels.layer_norm import triton as layer_norm
from llmstack_kernels.rms_norm import triton as rms_norm
from llmstack_kernels.rotary_and_cache import RotaryInputs
from llmstack_kernels.rotary_and_cache import triton as rotary_and_cache
from llmstack_kernels.rotary_embedding import triton as rotary_embedding

MARGIN = 4096  # more than any tile is too long
POISON = -77  # of integers; others are no numbers


class GuardedMemory:
    """Stands in for PyTorch's way to new tensors: each lies in the middle of poison, and holds poison."""

    def __init__(self) -> None:
        self.pieces: list[tuple[torch.Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape)
        poison = math.nan if dtype.is_floating_point else POISON
        whole = torch.full((size + 2 * MARGIN,), poison, dtype=dtype, device=device)
        self.pieces.append((whole, size))
        return whole[MARGIN : MARGIN + size].view(tuple(shape))

    def check(self) -> None:
        """Within is no poison, around is nothing else."""
        assert self.pieces
        for whole, size in self.pieces:
            is_poison = whole.isnan() if whole.is_floating_point() else whole == POISON
            assert is_poison[:MARGIN].all()
            assert is_poison[MARGIN + size :].all()
            assert not is_poison[MARGIN : MARGIN + size].any()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> GuardedMemory:
    """In place of PyTorch's from now on."""
    guarded = GuardedMemory()

    def empty_like(like: torch.Tensor) -> torch.Tensor:
        return guarded.empty(like.shape, like.dtype, like.device)

    original = torch.Tensor.new_empty

    def new_empty(like: torch.Tensor, shape: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if options:  # the interpreter's own call
            return original(like, shape, dtype=dtype, **options)
        return guarded.empty(shape, dtype or like.dtype, like.device)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return guarded


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rotate_and_write(x: torch.Tensor) -> None:
    key_cache, value_cache = torch.zeros(2, 3, 2, 4, 12, device=x.device)
    positions, slots = torch.tensor([[1, 0, 2], [-1, 5, 11]], device=x.device)
    heads = x.view(3, 7, 12)
    query, key, value = heads[:, :3], heads[:, 3:5], heads[:, 5:]
    table = normal(4, 8).to(x.device)
    inputs = RotaryInputs(positions, query, key, value, table, key_cache, value_cache, slots)
    rotary_and_cache.rotary_and_cache(inputs)


def rotate(x: torch.Tensor) -> None:
    heads, positions = x.view(3, 7, 12), torch.tensor([1, 0, 2], device=x.device)
    rotary_embedding.rotary_embedding(positions, heads[:, :5], heads[:, 5:], normal(4, 8).to(x.device))


# Of rows [3, 84], neither a power of two nor a multiple of what a program takes.
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rms_norm": lambda x: rms_norm.rms_norm(x, x[0], 1e-6),
    "fused_add_rms_norm": lambda x: rms_norm.fused_add_rms_norm(x, x, x[0], 1e-6),
    "layer_norm": lambda x: layer_norm.layer_norm(x, x[0], x[1], 1e-6),
    "fused_add_layer_norm": lambda x: layer_norm.fused_add_layer_norm(x, x, x[0], None, 1e-6),
    "silu_and_mul": activation.silu_and_mul,
    "gelu": activation.gelu,
    "embedding": lambda x: embedding.embedding(torch.tensor([2, 0], device=x.device), x, x[:2], 2.0),
    "argmax": argmax.argmax,
    "rotary_embedding": rotate,
    "rotary_and_cache": rotate_and_write,
}


@pytest.mark.parametrize("name", CALLS)
def test_all_of_the_outputs_is_written_and_nothing_beside_them(
    name: str, memory: GuardedMemory, triton_dtype: torch.dtype, triton_device: str
) -> None:
    CALLS[name](normal(3, 84).to(triton_device, triton_dtype))
    memory.check()


def test_the_guard_sees_what_is_missing_and_what_is_too_much(memory: GuardedMemory) -> None:
    out = torch.empty_like(torch.zeros(3))
    with pytest.raises(AssertionError):
        memory.check()
    out.fill_(1)
    memory.check()
    memory.pieces[0][0][MARGIN + 3] = 0
    with pytest.raises(AssertionError):
        memory.check()
