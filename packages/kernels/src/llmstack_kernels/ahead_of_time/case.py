"""A call of an operation whose kernels are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Claim = Literal["wgmma", "pdl"]
"""`wgmma`: the tensor cores' instruction for whole warp groups; `pdl`: waits for the kernel before on the device."""


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One configuration of an operation.

    Attributes:
        name: Says the shapes and types, such as `decode_8b_bf16`.
        call: Calls the operation's Triton code with meta tensors of real shapes. All launches in it are compiled.
        is_sample: Compiled by every run of the tests; there is one per kernel. The others are, in the full run.
        claims: What must show in the machine code for compute capability 9.0, by the kernel's function name.
        min_arch: The least compute capability it is for, such as 90 where it reads 8-bit floating point.
    """

    name: str
    call: Callable[[], object]
    is_sample: bool = False
    claims: dict[str, tuple[Claim, ...]] | None = None
    min_arch: int = 80
