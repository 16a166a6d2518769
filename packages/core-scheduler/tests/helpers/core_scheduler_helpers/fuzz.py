"""`python -m core_scheduler_helpers.fuzz --seeds 1000000`: simulations by seed, until one finds something.

The manager is named as `module:Class`, since this package knows none but its own fake.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence

from core_scheduler_helpers.simulation import ManagerFactory, Simulation
from llmstack_core_scheduler.protocols import KVCacheManager

REPORT_EVERY_S = 10.0
DEFAULT_MANAGER = "llmstack_core_scheduler.testing:FakeKVCacheManager"


def load_manager(name: str) -> ManagerFactory:
    """The class of that name, to be called with blocks and block size, and `num_host_blocks` as a keyword.

    Raises:
        ValueError: There is no such class.
    """
    module_name, _, class_name = name.partition(":")
    try:
        manager_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no KV-cache manager {name[:128]!r}; give module:Class") from error

    def make(num_blocks: int, block_size: int, num_host_blocks: int) -> KVCacheManager:
        manager: KVCacheManager = manager_class(num_blocks, block_size, num_host_blocks=num_host_blocks)
        return manager

    return make


def run_seed(
    seed: int,
    make_manager: ManagerFactory,
    sliding_windows: Sequence[int | None] = (None,),
    num_stages: int = 1,
    num_state_blocks: int = 0,
) -> Counter[str]:
    """What happened in the run of a seed; an exception of the run gets the seed as a note."""
    simulation = Simulation(seed, make_manager, sliding_windows, num_stages, num_state_blocks)
    try:
        simulation.run()
    except Exception as error:  # whatever it was, it is of no use without its seed
        error.add_note(f"replay it with --start {seed} --seeds 1")
        raise
    return simulation.totals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the seeds [start, start + seeds); 0 if all invariants held, 2 for a bad argument."""
    parser = argparse.ArgumentParser(prog="python -m core_scheduler_helpers.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--manager", default=DEFAULT_MANAGER, help="module:Class of the KV-cache manager")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    try:
        make_manager = load_manager(options.manager)
    except ValueError as error:
        parser.error(str(error))
    totals: Counter[str] = Counter()
    begin_s = reported_s = time.monotonic()
    for seed in range(options.start, options.start + options.seeds):
        totals += run_seed(seed, make_manager)
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_EVERY_S:
            reported_s = now_s
            _write(f"{seed + 1 - options.start} seeds in {now_s - begin_s:.0f} s")
    _write(f"{options.seeds} seeds held in {time.monotonic() - begin_s:.1f} s")
    _write(", ".join(f"{name} {number}" for name, number in sorted(totals.items())))
    return 0


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
