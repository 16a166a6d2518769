"""Rules that compiled kernels must satisfy, and findings against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from llmstack_kernels.ahead_of_time import collect
from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.compile import Compiled
from llmstack_kernels.ahead_of_time.measure import Measurements
from llmstack_kernels.ahead_of_time.target import MAX_GRID, Target

_AXES = "xyz"
# What is claimed shows in code for this compute capability; the instructions are not in older ones.
_CLAIMS_FROM_ARCH = 90
_WRITE = re.compile(r"\b(?:st\.global|atom\.global|red\.global)")


class Kind(StrEnum):
    """The rule that a finding is about."""

    COMPILE_ERROR = "compile error"
    LOCAL_MEMORY = "local memory"
    SHARED_MEMORY = "shared memory"
    TOO_LARGE = "too large"
    GRID = "grid"
    CLAIM = "claim"
    COVERAGE = "coverage"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to fail.

    Attributes:
        kind: The kind of the finding.
        where: Operation, case, kernel and architecture, as far as it concerns one.
        text: The fault, with the number and its limit.
    """

    kind: Kind
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}."


def coverage_findings(op: str, cases: Iterable[CompileCase]) -> Iterator[Finding]:
    """Kernels that nothing would compile."""
    for complaint in collect.coverage_complaints(op, cases):
        yield Finding(Kind.COVERAGE, op, complaint)


def findings(compiled: Compiled, result: Measurements | None) -> Iterator[Finding]:
    """The faults of one compiled kernel; it has no measurements if it does not compile."""
    if result is None:
        yield Finding(Kind.COMPILE_ERROR, str(compiled), f"does not compile: {compiled.binary}")
        return
    for kind, text in [
        *_resource_complaints(result, compiled.target),
        *_grid_complaints(compiled.launch.grid),
        *_claim_complaints(compiled, result),
    ]:
        yield Finding(kind, str(compiled), text)


def _resource_complaints(result: Measurements, target: Target) -> Iterator[tuple[Kind, str]]:
    if result.local_bytes > target.max_local_bytes:
        size = f"{result.local_bytes} bytes of local memory per thread in {result.spills} loads and stores"
        yield Kind.LOCAL_MEMORY, f"uses {size}: its registers spill"
    if result.shared_bytes > target.max_shared_bytes:
        text = f"needs {result.shared_bytes} bytes of shared memory, a block has {target.max_shared_bytes}"
        yield Kind.SHARED_MEMORY, text
    elif result.blocks_per_sm == 0:
        text = f"{result.num_warps} warps of {result.registers} registers do not fit a multiprocessor"
        yield Kind.TOO_LARGE, text


def _grid_complaints(grid: tuple[int, ...]) -> Iterator[tuple[Kind, str]]:
    for axis, size, limit in zip(_AXES, grid, MAX_GRID, strict=False):
        if size > limit:
            yield Kind.GRID, f"has {size} programs along {axis}, {limit} at most"


def _claim_complaints(compiled: Compiled, result: Measurements) -> Iterator[tuple[Kind, str]]:
    claims = (compiled.case.claims or {}).get(collect.name_of(compiled.launch.kernel), ())
    is_early = bool(compiled.launch.options.get("launch_pdl"))
    if compiled.target.arch < _CLAIMS_FROM_ARCH:
        return
    if "wgmma" in claims and not result.wgmma:
        yield Kind.CLAIM, f"claims products of warp groups (wgmma) and has none, but {result.mma} of single warps"
    if "pdl" in claims and not is_early:
        yield Kind.CLAIM, "claims to start while the kernel before it ends (pdl), without launch_pdl=True"
    if is_early and not result.pdl_waits:
        yield Kind.CLAIM, "is started with launch_pdl=True and never waits, so it may read what is not yet written"
    if is_early and _writes_before_waiting(compiled.binary.asm["ptx"]):
        yield Kind.CLAIM, "writes before it waits for the kernel before, which may still read or write there"


def _writes_before_waiting(ptx: str) -> bool:
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return bool(wait) and _WRITE.search(before) is not None
