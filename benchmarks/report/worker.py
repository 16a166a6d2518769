"""Runs blocks one after the other in a process of their own, and writes down what each of them gave."""

from __future__ import annotations

import argparse
import gc
import importlib
import time
import traceback
from pathlib import Path

import torch

from report.bench import Bench, BrokenDeviceError, first_line
from report.blocks import Block, find, fits
from report.environment import describe_run
from report.journal import Journal, Results

BROKEN_DEVICE = 3
"""Exit code: the blocks that are left need another process."""


def main(arguments: list[str] | None = None) -> int:
    """What the supervisor starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True)
    parser.add_argument("--blocks", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    journal = Journal(options.journal)
    bench = Bench(journal, is_smoke=options.smoke, deadline_s=options.deadline)
    if not Results.read(journal).header:
        header = describe_run(bench.device.type, is_smoke=options.smoke)
        journal.write("header", **header)
        bench.say("\n".join(f"{name}: {value}" for name, value in header.items()))
    blocks = [find(options.part, name) for name in options.blocks.split("|")]
    return run_blocks(bench, journal, blocks)


def run_blocks(bench: Bench, journal: Journal, blocks: list[Block]) -> int:
    """Exit code; a block that raises is reported and the next one runs, unless the device is gone with it."""
    for block in blocks:
        if not (bench.is_smoke or fits(block, bench.remaining_s())):
            outcome = f"dropped: {block.cost_s:.0f} s needed, {max(0, bench.remaining_s()):.0f} s left"
            journal.write("end", block=block.name, outcome=outcome, seconds=0.0)
            bench.say(f"\n== {block.name}: {outcome}")
            continue
        try:
            _run_block(bench, journal, block)
        except BrokenDeviceError as error:
            bench.say(f"== the device answers no more in this process: {error}")
            return BROKEN_DEVICE
    return 0


def _run_block(bench: Bench, journal: Journal, block: Block) -> None:
    start_s = time.monotonic()
    bench.begin(block.name, 1.5 * block.cost_s)
    bench.say(f"\n== {block.name}")
    journal.write("start", block=block.name, at_s=start_s)
    outcome = "done"
    try:
        module, _, name = block.function.partition(":")
        with torch.no_grad():  # inference mode would keep a peer from compiling
            getattr(importlib.import_module(module), name)(bench)
    except Exception as error:  # noqa: BLE001 - one block's failure is its result
        outcome = f"failed: {first_line(error)}"
        bench.say(f"{traceback.format_exc(limit=-6)}== {block.name}: {outcome}")
    seconds = time.monotonic() - start_s
    journal.write("end", block=block.name, outcome=outcome, seconds=seconds)
    bench.say(f"-- {block.name}: {seconds:.1f} s")
    gc.collect()
    bench.check_device()


if __name__ == "__main__":
    raise SystemExit(main())
