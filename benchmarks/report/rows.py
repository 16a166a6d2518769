"""One measured figure, what bounds it, and the tables figures are printed in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIMES = frozenset({"us", "ms", "s"})
"""Units of which less is better; of all others more is."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report.

    Attributes:
        name: Stable from run to run: targets and predictions are found by it.
        unit: Of `measured` and of `bound`.
        measured: None where nothing came out; `note` says why.
        bound: The least time or the highest rate that the ceilings of the same run allow, or a peer's figure.
        spread: How far two measurements of the same lie apart, as a share; a smaller difference is none.
    """

    name: str
    unit: str
    measured: float | None = None
    bound: float | None = None
    spread: float | None = None
    note: str = ""

    def percent(self) -> float | None:
        """How near the bound it is, 100 at it."""
        if not self.measured or not self.bound:
            return None
        return 100 * (self.bound / self.measured if self.unit in TIMES else self.measured / self.bound)


def number(value: float | None) -> str:
    """Three or four significant digits, nothing where there is nothing."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first aligned left."""
    rows = [list(header), *(list(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()


def describe(row: Row) -> str:
    """One line, for reading along while it runs."""
    parts = [f"  {row.name}: {number(row.measured) or '-'} {row.unit}".rstrip()]
    percent = row.percent()
    if percent is not None:
        parts.append(f"{percent:.1f} % of {number(row.bound)}")
    if row.spread is not None:
        parts.append(f"spread {100 * row.spread:.1f} %")
    if row.note:
        parts.append(row.note)
    return ", ".join(parts)
