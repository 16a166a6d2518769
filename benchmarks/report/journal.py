"""The file through which a worker tells what it does, a line of JSON at a time, so that nothing is lost with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from report.rows import Row


class Journal:
    """Appends; each line is on its way before the call returns."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self.path = path

    def write(self, kind: str, **fields: Any) -> None:
        """One line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """All whole lines so far; a worker that was killed may have left part of one."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


@dataclass(slots=True)
class Results:
    """What a journal says.

    Attributes:
        ceilings: Name with unit to value.
        rows: Each with its block; a name that comes twice counts with its last figure.
        outcomes: Block to `done`, or why it is not.
        seconds: Block to how long it took.
        under_way: The block that started last and has not ended, and when (monotonic seconds).
    """

    header: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, Row]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    under_way: tuple[str, float] | None = None

    @classmethod
    def read(cls, journal: Journal) -> Results:
        """All of it."""
        results = cls()
        for line in journal.lines():
            results._take(**line)
        return results

    def _take(self, kind: str, **fields: Any) -> None:
        if kind == "header":
            self.header |= fields
        elif kind == "ceiling":
            self.ceilings[fields["name"]] = fields["value"]
        elif kind == "row":
            self.rows.append((fields.pop("block"), Row(**fields)))
        elif kind == "text":
            self.texts.append((fields["block"], fields["text"]))
        elif kind == "start":
            self.under_way = (fields["block"], fields["at_s"])
        elif kind == "end":
            self.under_way = None
            self.outcomes[fields["block"]] = fields["outcome"]
            self.seconds[fields["block"]] = fields["seconds"]

    def by_name(self) -> dict[str, Row]:
        """Row by name; a row without a figure never hides one with it."""
        found: dict[str, Row] = {}
        for _, row in self.rows:
            if row.measured is not None or row.name not in found:
                found[row.name] = row
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "header": self.header,
            "ceilings": self.ceilings,
            "rows": [{"block": block, **asdict(row), "percent": row.percent()} for block, row in self.rows],
            "texts": [{"block": block, "text": text} for block, text in self.texts],
            "outcomes": self.outcomes,
            "seconds": self.seconds,
        }
