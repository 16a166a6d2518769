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
    "avx512bf16": {
        1: (1.00, 1.03, 1.04, 1.05, 1.09, 1.36, 1.33),
        2: (1.00, 1.03, 1.07, 1.12, 1.19, 1.47, 1.69),
        4: (1.00, 1.11, 1.20, 1.47, 1.61, 2.11, 2.65),
        8: (1.00, 1.36, 1.60, 2.01, 2.42, 3.57, 4.47),
        16: (1.00, 1.51, 2.05, 2.80, 3.39, 4.53, 5.89),
    },
}
"""For a variant and a number of rows: the time of a step with drafts in every row over that of the step without.

By `packages/llm/benchmarks/measure_draft_costs.py`. GPT-2's shape in bfloat16, one thread, 2026-11-30. `avx2`: AMD EPYC
(Zen 3), a busy machine. `avx512bf16`: AMD EPYC (Zen 5), quiet, medians of up to five runs, with a doubt of 0.08 from 8
rows on. Variants without a measurement have the linear costs of a `SpeculativeConfig`.
"""

SMALL_STEP_COSTS: Final[Mapping[str, Mapping[int, Sequence[float]]]] = {
    "avx2": {
        1: (1.00, 2.47, 2.60, 2.90, 3.62, 5.09, 6.13),
        2: (1.00, 2.15, 2.70, 3.71, 4.33, 6.59, 7.61),
        4: (1.00, 2.18, 2.80, 3.62, 4.34, 5.60, 6.91),
        8: (1.00, 1.88, 2.41, 3.18, 3.84, 5.21, 6.52),
        16: (1.00, 1.71, 2.27, 3.03, 3.67, 5.01, 7.19),
    },
    "avx512bf16": {
        1: (1.00, 1.96, 1.92, 1.97, 1.98, 2.52, 3.13),
        2: (1.00, 2.16, 2.07, 2.78, 2.90, 3.86, 4.10),
        4: (1.00, 1.95, 2.28, 2.54, 3.20, 4.05, 5.24),
        8: (1.00, 1.87, 2.20, 2.64, 2.92, 3.73, 4.57),
        16: (1.00, 1.47, 1.81, 2.24, 2.63, 3.29, 5.15),
    },
}
"""The same of a small model, whose step takes little more than its calls: the demo model, measured with `--small`.

AMD EPYC (Zen 5), 2026-11-30, at a load average of 8 with a doubt of up to 0.28: means of two runs, and one run of
`avx2` on that processor.
"""

QUANTIZED: Final = " quantized"
"""What the name of a variant ends with where it computes from weights of few bits."""

QUANTIZED_STEP_COSTS: Final[Mapping[str, Mapping[int, Sequence[float]]]] = {
    "avx2": {
        1: (1.00, 1.22, 1.64, 1.87, 2.30, 3.40, 3.94),
        2: (1.00, 1.45, 2.10, 2.74, 3.53, 4.54, 5.65),
        4: (1.00, 2.13, 2.65, 3.62, 4.66, 6.02, 7.38),
        8: (1.00, 1.88, 2.79, 3.53, 4.22, 5.71, 7.33),
    },
}
"""The same of weights of few bits, whose numbers are computed for each token and not only read once for a step.

SmolLM2-135M in Q4_1, AMD EPYC (Zen 3), 2026-12-01, a busy machine: medians of five runs for one row, one run for more.
GPT-2's shape in `int8` and `int4` has the same costs of one row, and in `int8_dynamic` and `int4_dynamic` up to 0.25
less of each. Variants that are not here have the costs of weights in full precision.
"""

STEP_BYTES: Final = 248_879_616
SMALL_STEP_BYTES: Final = 9_733_632
QUANTIZED_STEP_BYTES: Final = 81_413_280
"""What a step of each of the three models reads of weights."""


def draft_costs(variant: str, num_rows: int, max_num_drafts: int, step_bytes: int = 0) -> Sequence[float]:
    """The costs of 0 to `max_num_drafts` drafts in each of so many rows; empty for a variant that was not measured.

    `variant` is the name of one, with `QUANTIZED` behind it for weights of few bits.

    Between the columns they are linear, and beyond the last one too. Of two numbers of rows the larger counts,
    and of more rows than were measured the largest that was.

    What the small model's costs are above the other's is time that a step with drafts takes whatever the model is. So
    between the two it falls as the bytes of a step grow: it is linear in their inverse. 0 bytes are unknown ones.
    """
    name = variant.removesuffix(QUANTIZED)
    if name not in STEP_COSTS:
        return ()
    table, measured_bytes = STEP_COSTS[name], STEP_BYTES
    if name != variant and name in QUANTIZED_STEP_COSTS:
        table, measured_bytes = QUANTIZED_STEP_COSTS[name], QUANTIZED_STEP_BYTES
    costs = _of_rows(table, num_rows, max_num_drafts)
    share = _share_of_small(step_bytes, measured_bytes)
    if not share:
        return costs
    small = _of_rows(SMALL_STEP_COSTS[name], num_rows, max_num_drafts)
    return [own + share * (other - own) for own, other in zip(costs, small, strict=True)]


def _share_of_small(step_bytes: int, measured_bytes: int) -> float:
    if not 0 < step_bytes < measured_bytes:
        return 0.0
    least = 1 / measured_bytes
    return (1 / max(step_bytes, SMALL_STEP_BYTES) - least) / (1 / SMALL_STEP_BYTES - least)


def _of_rows(table: Mapping[int, Sequence[float]], num_rows: int, max_num_drafts: int) -> list[float]:
    measured = list(table)
    costs = table[measured[min(bisect_left(measured, num_rows), len(measured) - 1)]]
    found = []
    for number in range(max_num_drafts + 1):
        index = min(max(bisect_left(NUMS_DRAFTS, number), 1), len(costs) - 1)
        first, last = NUMS_DRAFTS[index - 1], NUMS_DRAFTS[index]
        found.append(costs[index - 1] + (costs[index] - costs[index - 1]) * (number - first) / (last - first))
    return found
