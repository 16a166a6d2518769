"""The costs of drafts by native variant: a table in place of a clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

NUMS_DRAFTS: Final = (0, 1, 2, 3, 4, 6, 8)
"""Drafts of each row in the columns of `STEP_COSTS`."""

STEP_COSTS: Final[Mapping[str, Mapping[int, Sequence[float]]]] = {
    "avx2": {
        1: (1.00, 1.06, 1.07, 1.23, 1.46, 1.68, 2.24),
        2: (1.00, 1.20, 1.82, 1.61, 2.24, 3.24, 4.25),
        4: (1.00, 1.32, 2.25, 2.94, 3.30, 4.91, 5.87),
        8: (1.00, 2.17, 3.48, 4.16, 5.14, 7.08, 9.34),
    },
}
"""For a variant and a number of rows: the time of a step with drafts in every row over that of the step without.

By `packages/llm/benchmarks/measure_draft_costs.py`. `avx2`: AMD EPYC (Zen 3), GPT-2's shape in bfloat16, one thread, a
busy machine, 2026-11-30. Variants without a measurement have the linear costs of a `SpeculativeConfig`.
"""


def draft_costs(variant: str, num_rows: int, max_num_drafts: int) -> Sequence[float]:
    """The costs of 0 to `max_num_drafts` drafts in each of so many rows; empty for a variant that was not measured.

    Between the columns they are linear, and beyond the last one too. Of two numbers of rows the larger counts,
    and of more rows than were measured the largest that was.
    """
    table = STEP_COSTS.get(variant)
    if table is None:
        return ()
    measured = list(table)
    costs = table[measured[min(bisect_left(measured, num_rows), len(measured) - 1)]]
    return [_between(costs, number) for number in range(max_num_drafts + 1)]


def _between(costs: Sequence[float], num_drafts: int) -> float:
    index = min(max(bisect_left(NUMS_DRAFTS, num_drafts), 1), len(costs) - 1)
    first, last = NUMS_DRAFTS[index - 1], NUMS_DRAFTS[index]
    return costs[index - 1] + (costs[index] - costs[index - 1]) * (num_drafts - first) / (last - first)
