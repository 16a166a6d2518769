"""What a block is handed: the device, the ceilings so far, the time it has, and where its rows go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from report.floors import Ceilings
from report.journal import Journal, Results
from report.rows import Row, describe

Value = TypeVar("Value")

SMOKE_NOTE = "a smoke run: the figure means nothing"


class Bench:
    """One worker's view of the report.

    Attributes:
        is_smoke: Tiny shapes on the CPU, to see that the code runs.
        ceilings: Name with unit to value.
        known: Row by name, of all blocks so far.
    """

    def __init__(self, journal: Journal, *, is_smoke: bool, deadline_s: float = float("inf")) -> None:
        """Goes on where the journal ends; `deadline_s` is in monotonic seconds."""
        results = Results.read(journal)
        self.device = torch.device("cpu" if is_smoke else "cuda")
        self.is_smoke = is_smoke
        self.ceilings = results.ceilings
        self.known = results.by_name()
        self.block = ""
        self._journal = journal
        self._deadline_s = deadline_s
        self._block_deadline_s = deadline_s

    def begin(self, block: str, seconds: float) -> None:
        """Rows belong to `block` from here on, and it should take no longer than `seconds`."""
        self.block = block
        self._block_deadline_s = min(self._deadline_s, time.monotonic() + seconds)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, which Triton's interpreter computes wrongly: float16 there."""
        return self.pick(torch.bfloat16, torch.float16)

    def pick(self, real: Value, smoke: Value) -> Value:
        """The one that fits the run."""
        return smoke if self.is_smoke else real

    def has_time(self, cost_s: float) -> bool:
        """Whether the block can still measure something that takes so long."""
        return self.is_smoke or time.monotonic() + cost_s < self._block_deadline_s

    def remaining_s(self) -> float:
        """Until the budget is spent."""
        return self._deadline_s - time.monotonic()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ceiling(self, name: str, value: float) -> None:
        """Records what the device reached."""
        self.ceilings[name] = value
        self._journal.write("ceiling", name=name, value=value)
        self.row(Row(name, name.rpartition(" ")[2], value))

    def read_rate(self) -> float | None:
        """Bytes per second, if it was measured."""
        value = self.ceilings.get("read GB/s")
        return None if value is None else value * 1e9

    def floor_ceilings(self) -> Ceilings | None:
        """What floors are computed from, if both were measured."""
        read, product = self.ceilings.get("read GB/s"), self.ceilings.get("bf16 product TFLOP/s")
        return None if read is None or product is None else Ceilings(read * 1e9, product * 1e12)

    def row(self, row: Row) -> None:
        """Records and prints a figure."""
        if self.is_smoke:
            row = Row(row.name, row.unit, row.measured, row.bound, row.spread, row.note or SMOKE_NOTE)
        fields = {name: getattr(row, name) for name in Row.__slots__}
        self.known[row.name] = row
        self._journal.write("row", block=self.block, **fields)
        self.say(describe(row))

    def text(self, text: str) -> None:
        """Records and prints lines that are no figures."""
        self._journal.write("text", block=self.block, text=text)
        self.say(text)

    def say(self, text: str) -> None:
        """Prints at once: what is killed later has been seen."""
        print(text, flush=True)

    def attempt(self, name: str, unit: str, measure: Callable[[], Row | None]) -> Row | None:
        """One row of several; what it raises becomes its note, and the next one is tried.

        An error of the device itself goes through: after it nothing else works in this process.
        """
        try:
            row = measure()
        except Exception as error:  # noqa: BLE001 - whatever an operation or a peer raises is that row's result
            self.row(Row(name, unit, note=f"failed: {first_line(error)}"))
            self.check_device()
            return None
        if row is not None:
            self.row(row)
        return row

    def check_device(self) -> None:
        """Raises if the device no longer answers; gives memory back otherwise."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise BrokenDeviceError(first_line(error)) from error


class BrokenDeviceError(RuntimeError):
    """The process can no longer use the device; a new one can."""


def first_line(error: BaseException) -> str:
    """Type and first line of an error, bounded."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
