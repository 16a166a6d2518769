"""Cold and warm loads of a checkpoint beside plain reads of its files.

    python packages/model-runner/benchmarks/bench_load.py MODEL [--turns 5] [--packing each]

Medians, in turns; rates are of the checkpoint's bytes. Each load is a process of its own. Before a cold turn the files
leave the page cache (`posix_fadvise`), which needs no root. The plain read is direct, in pieces of 16 MiB: what the
disk gives.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

_PIECE_BYTES = 16 << 20

_LOAD = """
import json, resource, sys, threading, time
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig
runner = ModelRunner(ModelRunnerConfig(sys.argv[1], max_model_len=256, pack_cache=sys.argv[2] == "kept"))
start_s, cpu_s = time.perf_counter(), time.process_time()
runner.load_model()
taken = time.perf_counter() - start_s, time.process_time() - cpu_s
rollup = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([*taken, int(rollup["Pss"].split()[0]) << 10, most << 10]))
for thread in threading.enumerate():  # what a first load keeps for the next ones
    if thread.name == "pack-cache":
        thread.join()
"""


def evict(files: list[Path]) -> None:
    """Drops the files' pages from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_directly(files: list[Path]) -> float:
    """Seconds that a read past the page cache takes."""
    buffer = mmap.mmap(-1, _PIECE_BYTES)
    start_s = time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while os.readv(descriptor, [buffer]) == _PIECE_BYTES:
            pass
        os.close(descriptor)
    return time.perf_counter() - start_s


def load(model: Path, packing: str) -> tuple[float, ...]:
    """Seconds, processor seconds, proportional memory afterwards and the most resident memory."""
    found = subprocess.run(
        [sys.executable, "-c", _LOAD, str(model), packing], capture_output=True, text=True, check=True
    )
    return tuple(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    """Prints a line per kind of load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--packing", choices=["kept", "each"], default="kept", help="packed weights are kept, or made by each start"
    )
    arguments = parser.parse_args()
    files = sorted(arguments.model.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    kept = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llmstack/packed"
    if arguments.packing == "kept":
        load(arguments.model, "kept")
    times: dict[str, list[tuple[float, ...]]] = {"direct read": [], "cold": [], "warm": []}
    for _ in range(arguments.turns):
        evict([*files, *(path for path in kept.rglob("*") if path.is_file())])
        times["direct read"].append((read_directly(files),))
        times["cold"].append(load(arguments.model, arguments.packing))
        times["warm"].append(load(arguments.model, arguments.packing))
    for kind, found in times.items():
        seconds, *rest = (statistics.median(values) for values in zip(*found, strict=True))
        line = f"{kind}: {seconds:.2f} s, {num_bytes / seconds / 1e9:.2f} GB/s"
        if rest:
            cpu_s, held, most = rest
            held, most = held / num_bytes, most / num_bytes
            line += f"; processor {cpu_s:.2f} s; proportional {held:.2f}, at most {most:.2f} times the files"
        print(line)


if __name__ == "__main__":
    main()
