"""Roofline table: bytes, products and time of each operation of a step.

    python packages/kernels/benchmarks/roofline.py --model gpt2 --rows 1 8 32 --prompt 512
    LLMSTACK_KERNELS=avx2 python packages/kernels/benchmarks/roofline.py --model llama-110m
    python packages/kernels/benchmarks/roofline.py --model gpt2 --cache-sizes 48K,1M,16M 32K,512K,4M

With `--cache-sizes` what is cut to caches is measured with each of these, in turns: so a stranger to the processor sees
whether the sizes that were read give the fastest cuts. `read` stands for them. The speed over the first is in brackets.

The roof of an operation is the larger of two times: its bytes at the rate at which memory is read, and its products at
the rate of products whose operands are in registers. Both rates are measured in turns with the operations. Weights and
caches are so many that none stays in the processor's cache. With one thread, times are processor time of the thread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from llmstack_kernels.activation import silu_and_mul
from llmstack_kernels.argmax import argmax
from llmstack_kernels.build_native import PACKAGE, find_compiler, flags_of
from llmstack_kernels.caches import ENVIRONMENT_VARIABLE, CacheSizes, describe, parse_cache_sizes, read_cache_sizes
from llmstack_kernels.embedding import embedding
from llmstack_kernels.layer_norm import layer_norm
from llmstack_kernels.linear import pack_linear
from llmstack_kernels.native import require_library
from llmstack_kernels.native.capture import Arena, capture
from llmstack_kernels.native.huge_pages import empty_in_huge_pages
from llmstack_kernels.paged_attention import AttentionInputs, paged_attention
from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_kernels.rms_norm import rms_norm
from llmstack_kernels.rotary_embedding import rotary_embedding

COLD_BYTES = 100 << 20  # of weights or caches: more than a processor keeps
BLOCK_SIZE = 16
NUM_ROUNDS = 7
READ = "read"  # the caches that the system reports
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of a decoder."""

    size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner_size: int
    vocab_size: int
    is_llama: bool = True

    @property
    def head_dim(self) -> int:
        return self.size // self.num_heads


MODELS = {
    "gpt2": Model(768, 12, 12, 12, 3072, 50257, is_llama=False),
    "llama-110m": Model(768, 12, 12, 4, 2048, 32000),
    "llama-1.1b": Model(2048, 22, 32, 4, 5632, 32000),
    "llama-8b": Model(4096, 32, 32, 8, 14336, 128256),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step, all alike."""

    num_rows: int
    num_tokens: int  # of each row
    context: int  # of each row, these tokens included

    @property
    def all_tokens(self) -> int:
        return self.num_rows * self.num_tokens

    def __str__(self) -> str:
        if self.num_tokens > 1:
            return f"prompt of {self.num_tokens}"
        return f"{self.num_rows} row{'s' * (self.num_rows > 1)} at {self.context}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operations of a step are made from."""

    model: Model
    batch: Batch
    dtype: torch.dtype
    quantization: str | None


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a step: its cost, and a function that makes its calls on cold copies of what it reads."""

    name: str
    num_calls: int  # in a step
    num_bytes: int  # read or written by a call
    num_flops: int
    run: Callable[[], None]
    num_copies: int
    is_cut: bool = True  # to the caches


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of an operation, in a whole step."""

    name: str
    num_bytes: float
    num_flops: float
    seconds: float
    roof_s: float


class Roofs:
    """The rates of the memory and of products, for a variant of the kernels."""

    def __init__(self, variant: str, num_threads: int, kind: str) -> None:
        self._library = _compile_probe(variant)
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._memory = empty_in_huge_pages(num_threads << 24, torch.int32).view(num_threads, -1).fill_(1)
        own = f"roofline_{variant}_{kind}"
        name = own if hasattr(self._library, own) else f"roofline_{kind}"
        self._products: Callable[[int], int] = self._library[name]
        self._read = self._library["roofline_read"]
        self._products.argtypes = [ctypes.c_int64]
        self._products.restype = ctypes.c_int64
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._bytes_per_s: list[float] = []
        self._flops_per_s: list[float] = []

    def measure(self) -> None:
        """One more reading of both rates."""
        num_bytes = self._memory[0].nbytes
        seconds = self._seconds(lambda part: self._read(self._memory[part].data_ptr(), num_bytes // 4))
        self._bytes_per_s.append(self._num_threads * num_bytes / seconds)
        made = self._products(1)
        seconds = self._seconds(lambda _: self._products(200_000))
        self._flops_per_s.append(self._num_threads * 2 * made * 200_000 / seconds)

    @property
    def bytes_per_s(self) -> float:
        return statistics.median(self._bytes_per_s)

    @property
    def flops_per_s(self) -> float:
        return statistics.median(self._flops_per_s)

    def _seconds(self, work: Callable[[int], object]) -> float:
        if self._num_threads == 1:
            return elapsed_s(lambda: work(0), 1)
        return elapsed_s(lambda: list(self._pool.map(work, range(self._num_threads))), self._num_threads)


def _compile_probe(variant: str) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("The roofs need a C++ compiler.")
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "roofline.so"
        flags = ["-std=c++20", "-O3", "-fPIC", "-shared", *flags_of(variant), "-I", str(PACKAGE)]
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def elapsed_s(work: Callable[[], object], num_threads: int) -> float:
    """Processor time of this thread; with more threads the time that passes."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The native calls of `work` alone, as a step replays them: no Python between them."""
    with capture(Arena()) as calls:
        work()

    def replay(_kept: object = work) -> None:  # a capture does not keep the tensors that it reads
        calls.replay()

    return replay


def copies(num_bytes: int, batch: Batch) -> int:
    """Copies of a weight or a cache. A prompt's products take so long that one is enough."""
    return 1 if batch.num_tokens > 1 else min(256, COLD_BYTES // num_bytes + 1)


def linear(name: str, shape: tuple[int, int], num_calls: int, rows: int, settings: Settings) -> Operation:
    """A linear layer [in, out] of `rows` rows."""
    in_features, out_features = shape
    batch, dtype = settings.batch, settings.dtype
    weight_bytes = in_features * out_features * (dtype.itemsize if settings.quantization is None else 1)
    if settings.quantization in ("int4", "int4_dynamic"):
        weight_bytes //= 2
    num_copies = copies(weight_bytes, batch)
    weight = torch.randn(out_features, in_features).to(dtype)
    layers = [pack_linear(weight, None, settings.quantization) for _ in range(num_copies)]
    x = torch.randn(rows, in_features).to(dtype)
    run = captured(lambda: [layer(x) for layer in layers])
    num_bytes = weight_bytes + rows * (in_features + out_features) * dtype.itemsize
    return Operation(name, num_calls, num_bytes, 2 * rows * in_features * out_features, run, num_copies)


def linears(settings: Settings) -> Iterator[Operation]:
    """All linear layers."""
    model, tokens = settings.model, settings.batch.all_tokens
    kv_size = model.num_kv_heads * model.head_dim
    inner = 2 * model.inner_size if model.is_llama else model.inner_size
    yield linear("linear: q, k, v", (model.size, model.size + 2 * kv_size), model.num_layers, tokens, settings)
    yield linear("linear: after attention", (model.size, model.size), model.num_layers, tokens, settings)
    yield linear("linear: up", (model.size, inner), model.num_layers, tokens, settings)
    yield linear("linear: down", (model.inner_size, model.size), model.num_layers, tokens, settings)
    # One row of logits for each row of the batch.
    yield linear("linear: output head", (model.size, model.vocab_size), 1, settings.batch.num_rows, settings)


def attention(settings: Settings) -> Iterator[Operation]:
    """Attention over blocks in random order, and the write of new keys and values."""
    model, batch, dtype = settings.model, settings.batch, settings.dtype
    blocks_per_row = -(-batch.context // BLOCK_SIZE)
    num_blocks = batch.num_rows * blocks_per_row
    tables = torch.randperm(num_blocks).to(torch.int32).view(batch.num_rows, blocks_per_row)
    starts = [row * batch.num_tokens for row in range(batch.num_rows + 1)]
    seq_lens = [batch.context] * batch.num_rows
    shape = (num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
    kv_bytes = 2 * batch.num_rows * batch.context * model.num_kv_heads * model.head_dim * dtype.itemsize
    num_copies = copies(kv_bytes, batch)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(num_copies)]
    query = torch.randn(batch.all_tokens, model.num_heads, model.head_dim).to(dtype)
    ints = (torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32), tables)
    scale = model.head_dim**-0.5
    calls = [AttentionInputs(query, *pair, *ints, scale, starts, seq_lens) for pair in caches]
    pairs = batch.num_rows * sum(range(batch.context - batch.num_tokens + 1, batch.context + 1))
    yield Operation(
        "attention",
        model.num_layers,
        kv_bytes + 2 * query.nbytes,
        4 * pairs * model.num_heads * model.head_dim,
        captured(lambda: [paged_attention(call) for call in calls]),
        num_copies,
    )
    key = torch.randn(batch.all_tokens, model.num_kv_heads, model.head_dim).to(dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[: batch.all_tokens]

    def write() -> None:
        for pair in caches:
            reshape_and_cache(key, key, *pair, slots)

    yield Operation("KV write", model.num_layers, 4 * key.nbytes, 0, captured(write), num_copies, is_cut=False)


def small_operations(settings: Settings) -> Iterator[Operation]:
    """Norms, rotations, activations, lookups and the greedy choice, on inputs that the processor's cache holds."""
    model, batch, dtype = settings.model, settings.batch, settings.dtype
    x = torch.randn(batch.all_tokens, model.size).to(dtype)
    weight = torch.ones(model.size, dtype=dtype)
    norms = 2 * model.num_layers + 1
    if model.is_llama:
        yield repeated("RMS norm", norms, 2 * x.nbytes, lambda: rms_norm(x, weight, 1e-5))
        gates = torch.randn(batch.all_tokens, 2 * model.inner_size).to(dtype)
        yield repeated("SiLU and product", model.num_layers, 3 * gates.nbytes // 2, lambda: silu_and_mul(gates))
        query = x.view(batch.all_tokens, model.num_heads, model.head_dim)
        key = query[:, : model.num_kv_heads].contiguous()
        positions, angles = torch.arange(batch.all_tokens), torch.randn(batch.all_tokens, model.head_dim)
        num_bytes = 2 * (query.nbytes + key.nbytes)
        yield repeated("rotation", model.num_layers, num_bytes, lambda: rotary_embedding(positions, query, key, angles))
    else:
        yield repeated("layer norm", norms, 2 * x.nbytes, lambda: layer_norm(x, weight, weight, 1e-5))
    table = torch.randn(model.vocab_size, model.size).to(dtype)
    ids = torch.randint(model.vocab_size, (batch.all_tokens,))
    yield repeated("embedding", 1, 2 * x.nbytes, lambda: embedding(ids, table))
    logits = torch.randn(batch.num_rows, model.vocab_size)
    yield repeated("greedy choice", 1, logits.nbytes, lambda: argmax(logits))


def repeated(name: str, num_calls: int, num_bytes: int, call: Callable[[], object]) -> Operation:
    """An operation whose calls are the same ones again."""
    num_repeats = 8
    return Operation(
        name, num_calls, num_bytes, 0, captured(lambda: [call() for _ in range(num_repeats)]), num_repeats, is_cut=False
    )


def measure(settings: Settings, roofs: Roofs, num_threads: int, caches: Sequence[str]) -> list[list[Row]]:
    """The step's operations for each of the caches, measured one after the other, in turns with the roofs."""
    library = require_library()
    measured = []
    for part in (linears, attention, small_operations):
        for operation in part(settings):
            if len(caches) > 1 and not operation.is_cut:
                continue
            operation.run()
            seconds: list[list[float]] = [[] for _ in caches]
            for first in range(NUM_ROUNDS):
                for turn in range(len(caches)):
                    index = (first + turn) % len(caches)
                    library.fit(sizes_of(caches[index]))
                    seconds[index].append(elapsed_s(operation.run, num_threads) / operation.num_copies)
                roofs.measure()
            measured.append((operation, [statistics.median(own) for own in seconds]))
    return [
        steps_of([(operation, seconds[index]) for operation, seconds in measured], roofs)
        for index in range(len(caches))
    ]


def steps_of(measured: Sequence[tuple[Operation, float]], roofs: Roofs) -> list[Row]:
    """A row for each operation, and one for the step. `measured`: Operations with the seconds of a call."""
    rows = []
    for operation, call_s in measured:
        num_bytes, num_flops = (operation.num_calls * cost for cost in (operation.num_bytes, operation.num_flops))
        roof_s = max(num_bytes / roofs.bytes_per_s, num_flops / roofs.flops_per_s)
        rows.append(Row(operation.name, num_bytes, num_flops, operation.num_calls * call_s, roof_s))
    costs = zip(*((row.num_bytes, row.num_flops, row.seconds, row.roof_s) for row in rows), strict=True)
    return [*rows, Row("the step", *map(sum, costs))]


def sizes_of(text: str) -> CacheSizes:
    """The caches that `text` names; those that this processor has for `read`."""
    return read_cache_sizes() if text == READ else parse_cache_sizes(text)


def print_comparison(title: str, caches: Sequence[str], found: Sequence[Sequence[Row]], roofs: Roofs) -> None:
    """The share of the roof for each of the caches, as a table in Markdown; and the speed over the first ones."""
    print(f"\n{title}: memory {roofs.bytes_per_s / 1e9:.1f} GB/s, products {roofs.flops_per_s / 1e9:.0f} GFLOP/s\n")
    print("| operation |", " | ".join(caches), "|")
    print("|---|", "---|" * len(caches), sep="")
    for rows in zip(*found, strict=True):
        shares = (f"{row.roof_s / row.seconds:.0%} ({rows[0].seconds / row.seconds:.2f})" for row in rows)
        print(f"| {rows[0].name} |", " | ".join(shares), "|")


def print_table(title: str, rows: list[Row], roofs: Roofs) -> None:
    """A table in Markdown."""
    print(f"\n{title}: memory {roofs.bytes_per_s / 1e9:.1f} GB/s, products {roofs.flops_per_s / 1e9:.0f} GFLOP/s\n")
    print("| operation | MB | GFLOP | ms | of the step | GB/s | GFLOP/s | of the roof |")
    print("|---|---|---|---|---|---|---|---|")
    step_s = rows[-1].seconds
    for row in rows:
        rates = f"{row.num_bytes / row.seconds / 1e9:.1f} | {row.num_flops / row.seconds / 1e9:.0f}"
        print(
            f"| {row.name} | {row.num_bytes / 1e6:.1f} | {row.num_flops / 1e9:.2f} | {row.seconds * 1e3:.2f}"
            f" | {row.seconds / step_s:.0%} | {rates} | {row.roof_s / row.seconds:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["gpt2"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32], help="rows of the decode steps")
    parser.add_argument("--context", type=int, default=256, help="of each row of a decode step")
    parser.add_argument("--prompt", nargs="*", type=int, default=[512], help="lengths of prompts")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4", "int8_dynamic", "int4_dynamic"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-sizes", nargs="+", metavar="L1,L2,L3", help="such as read 32K,512K,4M")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    variant = require_library().variant
    caches = options.cache_sizes or [os.environ.get(ENVIRONMENT_VARIABLE) or READ]
    print(f"caches: {describe()}")
    kind = "int8" if str(options.quantization).endswith("_dynamic") else options.dtype
    batches = [Batch(num_rows, 1, options.context) for num_rows in options.rows]
    batches += [Batch(1, length, length) for length in options.prompt]
    for name in options.model:
        for batch in batches:
            roofs = Roofs(variant, options.threads, kind)
            settings = Settings(MODELS[name], batch, DTYPES[options.dtype], options.quantization)
            with torch.inference_mode():
                found = measure(settings, roofs, options.threads, caches)
            title = f"{name}, {options.quantization or options.dtype}, {batch}, {variant}, {options.threads} thread(s)"
            if options.cache_sizes:
                print_comparison(title, caches, found, roofs)
            else:
                print_table(title, found[0], roofs)


if __name__ == "__main__":
    main()
