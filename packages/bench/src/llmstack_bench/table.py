"""Plain-text tables of results, with an optional JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmstack_bench.errors import BenchError

_UNITS = {"s": "s", "ms": "ms", "mib": "MiB"}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal width; the first column is left-aligned, numbers are right-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([_line(header, widths), rule, *(_line(row, widths) for row in rows)])


def format_number(value: float | None) -> str:
    """Three or four significant digits; `-` for None."""
    if value is None:
        return "-"
    magnitude = abs(value)
    if value == int(value) or magnitude >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 100 else f"{value:.2f}"


def format_ratio(value: float | None) -> str:
    """Two digits after the point; `-` for None."""
    return "-" if value is None else f"{value:.2f}"


def report_values(title: str, values: Mapping[str, float], options: argparse.Namespace) -> None:
    """Prints a table of named values, and writes them as JSON if `--output-json` is given."""
    rows = [[_title(name), format_number(value)] for name, value in values.items()]
    sys.stdout.write(format_table([title, ""], rows) + "\n")
    if options.output_json is None:
        return
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    try:
        options.output_json.write_text(json.dumps({"format": 1, "settings": settings, "results": values}, indent=2))
    except OSError as error:
        raise BenchError(f"--output-json {options.output_json}: {error.strerror}") from error


def _title(name: str) -> str:
    """`median_ready_s` becomes `median ready (s)`."""
    words, _, unit = name.rpartition("_")
    shown = _UNITS.get(unit)
    return name.replace("_", " ") if shown is None else f"{words.replace('_', ' ')} ({shown})"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()
