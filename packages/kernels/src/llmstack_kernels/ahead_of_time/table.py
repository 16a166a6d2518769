"""The stored table of compiled kernels, whose diff is a review of performance."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from llmstack_kernels.ahead_of_time.measure import Measurements

PATH = Path(__file__).with_name("compiled_kernels.csv")
COMMAND = "python -m llmstack_kernels.ahead_of_time --update"

_MEASURED = tuple(field.name for field in fields(Measurements))
_COLUMNS = ("op", "case", "kernel", "arch", *_MEASURED)
_HEADER = re.compile(r"# Triton ([^;\s]+)")

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel as one case starts it, for one compute capability."""

    op: str
    case: str
    kernel: str
    arch: int
    measurements: Measurements

    @property
    def key(self) -> Key:
        """The kernel, the case and the GPU that identify the row."""
        return self.op, self.case, self.kernel, self.arch

    def cells(self) -> tuple[str | int, ...]:
        """The row as it is stored."""
        return *self.key, *astuple(self.measurements)


@dataclass(frozen=True, slots=True)
class Table:
    """The stored table: rows, and the version of Triton that compiled them."""

    triton_version: str
    rows: tuple[Row, ...]


def read(path: Path = PATH) -> Table:
    """The table at `path`. A file of another form is a ValueError that names the error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header = _HEADER.match(lines[0]) if lines else None
    if header is None:
        raise ValueError(f"{path}: the first line does not name a version of Triton; {COMMAND} rewrites the table.")
    columns, *cells = csv.reader(lines[1:])
    if tuple(columns) != _COLUMNS:
        raise ValueError(f"{path}: the columns are not {', '.join(_COLUMNS)}; {COMMAND} rewrites the table.")
    return Table(header[1], tuple(_row(values) for values in cells))


def _row(cells: Sequence[str]) -> Row:
    op, case, kernel, arch, *measured = cells
    return Row(op, case, kernel, int(arch), Measurements(*map(int, measured)))


def write(table: Table, path: Path = PATH) -> None:
    """Write `table`, its rows in order, so that two equal ones are the same file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# Triton {table.triton_version}; written by {COMMAND}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(row.cells() for row in sorted(table.rows, key=lambda row: row.key))


def updated(stored: Iterable[Row], compiled: Iterable[Row], ops: Iterable[str], archs: Iterable[int]) -> list[Row]:
    """`stored` with all rows of `ops` for `archs` replaced by `compiled`."""
    replaced = {(op, arch) for op in ops for arch in archs}
    return [*(row for row in stored if (row.op, row.arch) not in replaced), *compiled]


def differences(stored: Iterable[Row], compiled: Iterable[Row], is_whole: bool) -> Iterator[str]:
    """A sentence per kernel that compiles to something else than is stored.

    Args:
        stored: Rows of the table.
        compiled: Rows of now.
        is_whole: `compiled` is all there is: what is stored and not in it is a difference too.
    """
    before, after = ({row.key: row for row in rows} for rows in (stored, compiled))
    for key, row in after.items():
        if key not in before:
            yield f"{_name(key)} is not in the table."
        elif changes := list(_changes(before[key], row)):
            yield f"{_name(key)}: {', '.join(changes)}."
    if is_whole:
        for key in before.keys() - after.keys():
            yield f"{_name(key)} is in the table and compiled by nothing."


def _changes(before: Row, after: Row) -> Iterator[str]:
    for name, old, new in zip(_MEASURED, astuple(before.measurements), astuple(after.measurements), strict=True):
        if old != new:
            yield f"{name} {old} -> {new}"


def _name(key: Key) -> str:
    op, case, kernel, arch = key
    return f"{op} {case} {kernel} sm_{arch}"


def render(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    lines = [[name.replace("_", " ") for name in _COLUMNS], *([str(cell) for cell in row.cells()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(_aligned, line, widths)) for line in lines)


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell.isdigit() else cell.ljust(width)
