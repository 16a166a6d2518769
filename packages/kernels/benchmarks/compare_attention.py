"""Attention of two builds of the kernels in turns, on the same keys and values.

    python packages/kernels/benchmarks/compare_attention.py --other FORMER.so --shape gpt2 --rows 1 8 --context 512

`--other` is a library that was built before, of the same variant: a copy of what `build_native` had written. The table
has the share of the roof that each build reaches, as `roofline.py` defines it, and the speed over the other one: the
median of the rounds. Blocks lie in random order, in caches that no processor's cache holds. The outputs must have the
same bits, unless `--new-bits` allows others.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from unittest.mock import patch

import torch
from roofline import BLOCK_SIZE, DTYPES, Batch, Roofs, copies, elapsed_s

from llmstack_kernels import native as native_module
from llmstack_kernels.native import NativeLibrary, Pointer, require_library
from llmstack_kernels.paged_attention import AttentionInputs
from llmstack_kernels.paged_attention import native as attention

# Query heads, KV heads, head_dim.
SHAPES = {"gpt2": (12, 12, 64), "llama-110m": (12, 4, 64), "llama-1.1b": (32, 4, 64), "llama-8b": (32, 8, 128)}


class Recorder:
    """In place of a library: keeps the arguments of the calls."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: list[bytes] = []

    def function(self, name: str, *_: type) -> object:
        """Notes the name, and returns what notes the arguments."""
        self.name = name
        return self.arguments.append


class Case:
    """Calls with caches of their own, whose keys and values are cold whenever their turn comes."""

    def __init__(self, shape: tuple[int, int, int], batch: Batch, dtype: torch.dtype, is_warm: bool) -> None:
        num_heads, num_kv_heads, head_dim = shape
        blocks_per_row = -(-batch.context // BLOCK_SIZE)
        num_blocks = batch.num_rows * blocks_per_row
        starts = [row * batch.num_tokens for row in range(batch.num_rows + 1)]
        query = torch.randn(batch.all_tokens, num_heads, head_dim).to(dtype)
        rows = (
            torch.tensor(starts, dtype=torch.int32),
            torch.full((batch.num_rows,), batch.context, dtype=torch.int32),
            torch.randperm(num_blocks).to(torch.int32).view(batch.num_rows, blocks_per_row),
        )
        kv_bytes = 2 * batch.num_rows * batch.context * num_kv_heads * head_dim * dtype.itemsize
        cache_shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        self.calls = Recorder()
        self.outputs, self._kept = [], [query, *rows]
        with patch.object(attention, "require_library", lambda: self.calls):
            for _ in range(1 if is_warm else copies(kv_bytes, batch)):
                pair = [torch.randn(cache_shape).to(dtype) for _ in range(2)]
                self._kept += pair
                self.outputs.append(attention.paged_attention(AttentionInputs(query, *pair, *rows, head_dim**-0.5)))
        pairs = batch.num_rows * sum(range(batch.context - batch.num_tokens + 1, batch.context + 1))
        self.num_bytes = kv_bytes + 2 * query.nbytes
        self.num_flops = 4 * pairs * num_heads * head_dim

    def seconds(self, library: NativeLibrary, num_threads: int) -> float:
        """Of a call."""
        function = library.function(self.calls.name, Pointer)

        def run() -> None:
            for arguments in self.calls.arguments:
                function(arguments)

        return elapsed_s(run, num_threads) / len(self.outputs)


def load(path: Path) -> NativeLibrary:
    """A library that lies elsewhere, of the variant that runs."""
    variant = require_library().variant
    with patch.object(native_module, "library_path", lambda _: path):
        return NativeLibrary(variant)


def compare(case: Case, libraries: list[NativeLibrary], roofs: Roofs, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of a call for each library, round by round."""
    found: list[list[float]] = [[] for _ in libraries]
    outputs = []
    for library in libraries:
        case.seconds(library, options.threads)
        outputs.append(torch.cat(case.outputs))
    if not options.new_bits and not torch.equal(*outputs):
        raise SystemExit("The outputs differ.")
    for _ in range(options.rounds):
        for index in random.sample(range(len(libraries)), len(libraries)):
            found[index].append(case.seconds(libraries[index], options.threads))
        roofs.measure()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="library of the build to compare with")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8], help="rows of the decodes")
    parser.add_argument("--context", nargs="*", type=int, default=[512, 2048], help="of each row of a decode")
    parser.add_argument("--prompt", nargs="*", type=int, default=[], help="lengths of prompts")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", action="store_true", help="one cache alone, which the processor's may hold")
    parser.add_argument("--new-bits", action="store_true", help="outputs may differ")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    libraries = [load(options.other), require_library()]
    roofs = Roofs(libraries[0].variant, options.threads, options.dtype)
    batches = [Batch(num_rows, 1, context) for context in options.context for num_rows in options.rows]
    batches += [Batch(1, length, length) for length in options.prompt]
    print("| attention | us, the other | of the roof | us, this one | of the roof | speed over the other |")
    print("|---|---|---|---|---|---|")
    for shape in options.shape:
        for batch in batches:
            case = Case(SHAPES[shape], batch, DTYPES[options.dtype], options.warm)
            found = compare(case, libraries, roofs, options)
            roof_s = max(case.num_bytes / roofs.bytes_per_s, case.num_flops / roofs.flops_per_s)
            medians = [statistics.median(seconds) for seconds in found]
            columns = " | ".join(f"{median * 1e6:.0f} | {roof_s / median:.0%}" for median in medians)
            speed = statistics.median(other / own for other, own in zip(*found, strict=True))
            print(f"| {shape}, {batch} | {columns} | {speed:.2f} |", flush=True)
    print(f"memory {roofs.bytes_per_s / 1e9:.1f} GB/s, products {roofs.flops_per_s / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
