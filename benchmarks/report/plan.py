"""The rows that decide, each with its target and what was predicted for it before any run.

Targets are what the design asks for; predictions are arithmetic from floors and published figures, never measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from report.rows import TIMES, Row, number, table


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row of the short table.

    Attributes:
        bound: What 100 % are.
        least_percent: The target, of `bound`; None where the target is a value.
        limit: The target as a value in `unit`: at most for times and counts of mistakes, at least otherwise.
    """

    part: str
    name: str
    unit: str
    bound: str = ""
    least_percent: float | None = None
    limit: float | None = None
    predicted: str = ""

    def target(self) -> str:
        """In words."""
        if self.least_percent is not None:
            return f">= {self.least_percent:g} %"
        if self.limit is None:
            return ""
        return f"{'<=' if self._is_less_better() else '>='} {self.limit:g} {self.unit}"

    def is_met(self, row: Row) -> bool | None:
        """Whether `row` reaches the target; None without a figure or a target."""
        if row.measured is None:
            return None
        if self.least_percent is not None:
            percent = row.percent()
            return None if percent is None else percent >= self.least_percent
        if self.limit is None:
            return None
        return row.measured <= self.limit if self._is_less_better() else row.measured >= self.limit

    def _is_less_better(self) -> bool:
        return self.unit in TIMES or self.unit in ("%", "differing", "wrong", "nat")


def _kernel(name: str, unit: str, bound: str, least: float | None = None, predicted: str = "") -> PlannedRow:
    return PlannedRow("kernels", name, unit, bound, least, predicted=predicted)


def _engine(name: str, unit: str, bound: str, least: float | None = None, predicted: str = "") -> PlannedRow:
    return PlannedRow("engine", name, unit, bound, least, predicted=predicted)


READ, PRODUCT, FLOOR = "read ceiling", "bf16 product", "floor"

PLAN: tuple[PlannedRow, ...] = (
    PlannedRow("kernels", "operations off by 1e-2 or more", "wrong", limit=0, predicted="0"),
    PlannedRow("kernels", "rows that differ by batch, slot or chunk", "differing", limit=0, predicted="0"),
    *(
        _kernel(f"decode attention {model} bf16, {batch}", "GB/s", READ, 85, "85 to 90 %")
        for model in ("8B", "1B")
        for batch in ("64 x 1k", "64 x 8k", "ragged 64")
    ),
    _kernel("prefill attention 8B, 8k", "TFLOP/s", PRODUCT, 50, "395 to 420 TFLOP/s"),
    _kernel("prefill attention 8B, 8k beside SDPA flash", "ms", "SDPA flash", 100, "370 by FlashAttention 2"),
    _kernel("prefill attention 8B, 2k beside SDPA flash", "ms", "SDPA flash", 100),
    _kernel("add + RMSNorm, 16384 x 4096", "GB/s", "copy ceiling", 85),
    _kernel("add + LayerNorm, 16384 x 4096", "GB/s", "copy ceiling", 85),
    _kernel("rotary + cache write, 16384 tokens of 8B", "GB/s", "copy ceiling", 85),
    _kernel("SiLU-mul, 16384 x 14336", "GB/s", "copy ceiling", 85),
    _kernel("start of a kernel by the host", "us", "Triton's own start", 200),
    _kernel("sampling, 256 x 128k", "us", "reading the logits once", 100 / 3),
    *(_kernel(f"deterministic linears 8B bf16, M = {rows}, beside cuBLAS", "us", "cuBLAS", 95) for rows in (1, 8, 64)),
    _kernel("8B up int8_dynamic, M = 2048, beside cuBLAS bf16", "us", "cuBLAS", 130),
    *(
        PlannedRow("engine", f"{model} tokens that differ without graphs and run-ahead", "differing", limit=0)
        for model in ("1B", "GPT-2")
    ),
    *(
        PlannedRow(
            "engine", f"{model} log-probabilities, largest difference from transformers in float32", "nat", limit=0.1
        )
        for model in ("1B", "GPT-2")
    ),
    _engine("8B decode, 1 x 1k", "ms", FLOOR, 88, "3.95 ms, 89 %"),
    _engine("1B decode, 1 x 1k", "ms", FLOOR, 75, "0.74 ms, 79 %"),
    _engine("GPT-2 decode, 1 x 1k", "ms", FLOOR, 35, "0.15 ms, 44 %"),
    _engine("8B step with 4 drafts, 1 x 1k", "ms", FLOOR, 80, "4.3 ms, 82 %"),
    _engine("8B requests, 256 x 1024/1024", "tok/s", FLOOR, 80, "9,500 tok/s"),
    *(
        PlannedRow("engine", f"{model} host overhead per step, 1 x 1k", "us", limit=200, predicted="under 50 us")
        for model in ("8B", "1B", "GPT-2")
    ),
    *(
        PlannedRow("engine", f"{model} device idle between steps, 1 x 1k", "%", limit=3)
        for model in ("8B", "1B", "GPT-2")
    ),
    _engine("8B decode beside transformers' static cache, 1 x 1k", "ms", "static cache", 100),
    _engine("1B decode beside transformers' static cache, 1 x 1k", "ms", "static cache", 100),
    _engine("GPT-2 decode beside transformers' static cache, 1 x 1k", "ms", "static cache", 100),
    _engine("8B requests beside transformers' continuous batching, 64 x 512/128", "tok/s", "continuous batching", 100),
    _engine("1B requests beside transformers' continuous batching, 64 x 512/128", "tok/s", "continuous batching", 100),
)

LADDER = (
    ("eager Python + Triton", "9-12 ms", "5 ms", "3-4 ms", "~6,000"),
    ("+ full graph", "4.5 (78 %)", "0.95", "0.26", "7,500"),
    ("+ state on the device, run-ahead", "4.4", "0.88", "0.24", "9,000"),
    ("+ fusion, 10 to 6 kernels a layer", "4.15 (85 %)", "0.80", "0.18", "9,300"),
    ("+ dependent launch", "3.95 (89 %)", "0.74 (79 %)", "0.15", "9,500"),
    ("+ int8 / int4 weights", "2.2 / 1.6", "0.50 / 0.42", "-", "same"),
)
"""Stage; one row at 1k of 8B, 1B and GPT-2 in ms a step; 8B 256 x 1024/1024 in tok/s. Compare it with the ablations."""


def ladder_table() -> str:
    """The predicted ladder."""
    return table(("predicted", "8B 1 x 1k", "1B", "GPT-2", "8B 256 x 1k/1k tok/s"), LADDER)


def short_table(part: str, rows: dict[str, Row]) -> str:
    """Every planned row of `part`, those without a figure too."""
    header = ("row", "measured", "unit", "spread", "bound", "%", "target", "met", "predicted")
    return table(header, [_short_line(planned, rows.get(planned.name)) for planned in PLAN if planned.part == part])


def _short_line(planned: PlannedRow, row: Row | None) -> list[str]:
    row = row or Row(planned.name, planned.unit)
    percent, is_met = row.percent(), planned.is_met(row)
    return [
        planned.name,
        number(row.measured) or "-",
        planned.unit,
        "" if row.spread is None else f"{100 * row.spread:.1f} %",
        number(row.bound),
        "" if percent is None else f"{percent:.1f}",
        planned.target(),
        "" if is_met is None else "yes" if is_met else "NO",
        planned.predicted,
    ]


def empty_markdown() -> str:
    """The short table of both parts for a document, with nothing measured."""
    lines = ["| row | unit | of | target | predicted | measured | % |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.unit} | {row.bound or '–'} | {row.target()} | {row.predicted or '–'} | | |"
        for row in PLAN
    ]
    return "\n".join(lines)
