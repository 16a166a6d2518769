"""Aligned plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal width: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([_line(header, widths), rule, *(_line(row, widths) for row in rows)])


def format_number(value: float | None) -> str:
    """Three or four digits that matter; `-` for nothing."""
    if value is None:
        return "-"
    magnitude = abs(value)
    if value == int(value) or magnitude >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 100 else f"{value:.2f}"


def format_ratio(value: float | None) -> str:
    """Two digits after the point; `-` for nothing."""
    return "-" if value is None else f"{value:.2f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()
