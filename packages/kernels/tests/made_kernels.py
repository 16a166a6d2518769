"""Kernels with faults, compiled by the tests in a process of their own; prints what was found as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from llmstack_kernels.ahead_of_time import collect
from llmstack_kernels.ahead_of_time.case import Claim, CompileCase
from llmstack_kernels.ahead_of_time.survey import Survey, survey_cases
from llmstack_kernels.ahead_of_time.target import TARGETS
from llmstack_kernels.launch import launch


@triton.jit
def _scale_kernel(x, out, SIZE: tl.constexpr):
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + columns, tl.load(x + columns) * 2)


@triton.jit
def _prefix_sum_kernel(x, out, SIZE: tl.constexpr):
    columns = tl.arange(0, SIZE)
    values = tl.load(x + columns)
    tl.store(out + columns, tl.cumsum(values, axis=0) / tl.sum(values, axis=0))


@triton.jit
def _chained_kernel(x, out, SIZE: tl.constexpr):
    gdc_wait()
    columns = tl.arange(0, SIZE)
    tl.store(out + columns, tl.load(x + columns) * 2)


@triton.jit
def _hasty_kernel(x, out, SIZE: tl.constexpr):
    columns = tl.arange(0, SIZE)
    tl.store(out + columns, tl.load(x + columns) * 2)
    gdc_wait()


@triton.jit
def _product_kernel(x, weight, out, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, size, K):
        left = tl.load(x + rows[:, None] * size + (start + inner)[None, :])
        right = tl.load(weight + columns[None, :] * size + (start + inner)[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


def scale(kernel: object, size: int, grid: tuple[int, ...] = (1,), **options: object) -> Callable[[], object]:
    x = torch.empty(1 << 20, device="meta")
    return partial(launch, kernel, grid, x, x, SIZE=size, **options)


def product(m: int, n: int, k: int, num_stages: int = 2) -> Callable[[], object]:
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    out = torch.empty(m, n, device="meta")
    return partial(launch, _product_kernel, (1,), x, weight, out, 4096, M=m, N=n, K=k, num_stages=num_stages)


def equal_launches_and_another() -> None:
    for size in (256, 256, 512):
        scale(_scale_kernel, size)()


WGMMA: dict[str, tuple[Claim, ...]] = {"_product_kernel": ("wgmma",)}
CASES = [
    CompileCase("sound", product(64, 64, 64), is_sample=True, claims=WGMMA),
    CompileCase("thrice", equal_launches_and_another),
    CompileCase("no_power_of_two", scale(_scale_kernel, 3)),
    CompileCase("spills", scale(_prefix_sum_kernel, 8192, num_warps=1, maxnreg=32)),
    CompileCase("too_much_shared", product(128, 256, 128, num_stages=5)),
    CompileCase("single_warps", product(16, 64, 64), claims=WGMMA),
    CompileCase("grid", scale(_scale_kernel, 256, (1, 70_000))),
    CompileCase("waits", scale(_chained_kernel, 256, launch_pdl=True), claims={"_chained_kernel": ("pdl",)}),
    CompileCase("starts_late", scale(_chained_kernel, 256), claims={"_chained_kernel": ("pdl",)}),
    CompileCase("never_waits", scale(_scale_kernel, 256, launch_pdl=True)),
    CompileCase("writes_early", scale(_hasty_kernel, 256, launch_pdl=True)),
    CompileCase("for_newer", scale(_scale_kernel, 256), min_arch=100),
]


def main() -> None:
    survey = Survey()
    survey_cases(survey, "made", CASES, [TARGETS[90]])
    coverage = list(collect.coverage_complaints("rms_norm", []))
    mistaken = CompileCase("mistaken", scale(_scale_kernel, 256), claims=WGMMA)
    coverage += collect.coverage_complaints("rms_norm", [mistaken, mistaken])
    json.dump(
        {
            "findings": [[finding.where, finding.kind, finding.text] for finding in survey.findings],
            "rows": [row.cells() for row in survey.rows],
            "coverage": coverage,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
