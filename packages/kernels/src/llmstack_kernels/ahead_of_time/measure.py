"""Reads what the compiler made of a kernel out of its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmstack_kernels.ahead_of_time.target import Target

_RESOURCE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
# A line of machine code: its address, perhaps a predicate, the instruction, whose parts are joined by points.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_MATRIX = frozenset({"HMMA", "IMMA", "QMMA", "BMMA", "DMMA"})
_WGMMA = frozenset({"HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"})
_ASYNC_COPIES = frozenset({"LDGSTS", "UTMALDG", "UBLKCP"})


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one kernel for one kind of GPU; all but the first four count instructions in its code.

    Attributes:
        num_warps: Per block, those that the compiler added included.
        registers: Per thread.
        shared_bytes: Shared memory per block.
        blocks_per_sm: Blocks that can be resident on a multiprocessor.
        instructions: All of them.
        wgmma: Products of whole warp groups (from compute capability 9.0), or in tensor memory (10.0).
        mma: Products of single warps.
        async_copies: From global to shared memory, past the registers.
        pdl_waits: Waits for the kernel before.
        pdl_leaves: Leaves to start for the kernel after.
        spills: Loads and stores of local memory.
        local_bytes: Local memory per thread, the stack included.
    """

    num_warps: int
    registers: int
    shared_bytes: int
    blocks_per_sm: int
    instructions: int
    wgmma: int
    mma: int
    async_copies: int
    pdl_waits: int
    pdl_leaves: int
    spills: int
    local_bytes: int


def measure(compiled: Any, target: Target) -> Measurements:
    """Measure Triton's `CompiledKernel` with the tools that come with Triton."""
    resources, code = _read(compiled.asm["cubin"])
    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return Measurements(
        num_warps=num_warps,
        registers=resources["REG"],
        shared_bytes=shared,
        blocks_per_sm=target.blocks_per_sm(num_warps, resources["REG"], shared),
        instructions=code.total(),
        wgmma=_count(code, _WGMMA),
        mma=_count(code, _MATRIX),
        async_copies=_count(code, _ASYNC_COPIES),
        pdl_waits=compiled.asm["ptx"].count("griddepcontrol.wait"),
        pdl_leaves=compiled.asm["ptx"].count("griddepcontrol.launch_dependents"),
        spills=code["LDL"] + code["STL"],
        local_bytes=resources["LOCAL"] + resources["STACK"],
    )


def parse_resources(text: str) -> dict[str, int]:
    """`REG`, `STACK` and `LOCAL` out of the listing of resources of one kernel; ValueError where one is missing."""
    found = {name: int(value) for name, value in _RESOURCE.findall(text)}
    if missing := {"REG", "STACK", "LOCAL"} - found.keys():
        raise ValueError(f"the listing of resources names no {', '.join(sorted(missing))}: {text!r}")
    return found


def count_instructions(text: str) -> Counter[str]:
    """Counts of instructions, without suffixes, in a listing of machine code; ValueError where it is empty.

    What only fills the end of the code (`NOP`) is not counted.
    """
    counts = Counter(_INSTRUCTION.findall(text))
    del counts["NOP"]
    if not counts:
        raise ValueError(f"no instruction in a listing of {len(text)} characters.")
    return counts


def _count(code: Counter[str], names: frozenset[str]) -> int:
    return sum(code[name] for name in names)


@cache  # several cases start the same kernel
def _read(cubin: bytes) -> tuple[dict[str, int], Counter[str]]:
    listing = _disassemble(cubin)
    return parse_resources(listing), count_instructions(listing)


def _disassemble(cubin: bytes) -> str:
    """Resources and machine code; takes 0.3 s even for a small kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
