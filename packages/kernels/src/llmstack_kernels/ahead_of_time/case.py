"""A call of an operation whose kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Claim = Literal["wgmma", "pdl"]
"""`wgmma`: the tensor cores' instruction for whole warp groups; `pdl`: waits for the kernel before on the device."""


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One configuration of an operation.

    Attributes:
        name: Names shapes and types, such as `decode_8b_bf16`.
        call: Calls the operation's Triton code with meta tensors of real shapes. All launches in it are compiled.
        is_sample: Compiled by every run of the tests; each kernel has one. Other cases are compiled by the full run.
        claims: Instructions required in the machine code for compute capability 9.0, by the kernel's function name.
        min_arch: The lowest compute capability it is compiled for, such as 90 for 8-bit floating point.
    """

    name: str
    call: Callable[[], object]
    is_sample: bool = False
    claims: dict[str, tuple[Claim, ...]] | None = None
    min_arch: int = 80


def meta_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor with a shape and a type, without memory.

    That is all a launch needs to be compiled: pointers are described by their types.
    """
    return torch.empty(shape, dtype=dtype, device="meta")
