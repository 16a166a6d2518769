"""Whether a row's bits depend on what is computed with it: its batch, its slot, how its prompt is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.linear import INT8_DYNAMIC, QUANTIZATIONS, linear, pack_linear
from llmstack_kernels.rms_norm import fused_add_rms_norm
from llmstack_kernels.sample_tokens import SamplingState, sample_tokens
from report.bench import Bench
from report.floors import LLAMA_1B, LLAMA_8B, ModelShape
from report.kernels.attention_inputs import Batch, make_batch, ragged_lengths
from report.kernels.linears import layers
from report.kernels.sampling import FILTERED, make_logits, make_state
from report.rows import Row

BATCHES = (1, 2, 7, 64, 256)
NUM_ROWS = (1, 8, 16, 64, 256)
SUMMARY = "rows that differ by batch, slot or chunk"

Check = Callable[[Bench], tuple[int, int]]
"""How many rows differ in a bit, of how many."""


def run(bench: Bench) -> None:
    """A row for each operation, and the sum; one that cannot be checked differs."""
    num_differing = num_checked = 0
    for name, check in checks(bench):
        found = bench.attempt(f"invariance of {name}", "differing", partial(_row, bench, name, check))
        num_checked += 1
        num_differing += 1 if found is None or found.measured is None else int(found.measured)
    bench.row(Row(SUMMARY, "differing", float(num_differing), note=f"{num_checked} checks"))


def _row(bench: Bench, name: str, check: Check) -> Row:
    num_differing, num_rows = check(bench)
    return Row(f"invariance of {name}", "differing", float(num_differing), note=f"of {num_rows}")


def checks(bench: Bench) -> Iterator[tuple[str, Check]]:
    """All operations whose result a batch could change."""
    for shape in (LLAMA_8B, LLAMA_1B):
        yield f"decode attention {shape.name}", partial(_decode, shape=shape)
        yield f"chunked prefill attention {shape.name}", partial(_chunks, shape=shape)
    yield "decode attention 8B, fp8 KV", partial(_decode, shape=LLAMA_8B, kv_dtype=torch.float8_e4m3fn)
    for layer in layers(LLAMA_8B)[:-1]:
        for scheme in (None, *QUANTIZATIONS, INT8_DYNAMIC):
            size = bench.pick((layer.out_features, layer.in_features), (48, 128))
            yield f"{layer.title} {scheme or 'bf16'}", partial(_linear, size=size, scheme=scheme)
    yield "add + RMSNorm", _norm
    yield "sampling", _sampling


def count_differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Rows that are not equal in every bit."""
    differs = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    return int(differs.flatten(1).any(1).sum())


def _decode(bench: Bench, shape: ModelShape, kv_dtype: torch.dtype | None = None) -> tuple[int, int]:
    """The first rows of a batch, in smaller batches and in other slots."""
    lengths = ragged_lengths(bench.pick(max(BATCHES), 5), bench.pick(4096, 40))
    batch = make_batch(bench, shape, [(1, length) for length in lengths], kv_dtype=kv_dtype)
    expected = batch.attend()
    num_differing = num_rows = 0
    for size in bench.pick(BATCHES, (1, 2, 5)):
        for indices in _slots(size, len(lengths)):
            num_differing += count_differing(batch.subset(indices).attend(), expected[indices])
            num_rows += size
    return num_differing, num_rows


def _slots(size: int, num_rows: int) -> tuple[list[int], list[int]]:
    """The first `size` rows in order, and the last ones from the back: two slots for those in the middle."""
    return list(range(size)), list(range(num_rows - 1, num_rows - 1 - size, -1))


def _chunks(bench: Bench, shape: ModelShape) -> tuple[int, int]:
    """A prompt whole, and cut in two ways: each token's result is a row."""
    length = bench.pick(1500, 40)
    whole = make_batch(bench, shape, [(length, length)])
    expected = whole.attend()
    num_differing = 0
    for cuts in bench.pick(((512, 1024), (100, 777, 1499)), ((16,), (7, 39))):
        parts = [_chunk(whole, start, end).attend() for start, end in zip((0, *cuts), (*cuts, length), strict=True)]
        num_differing += count_differing(torch.cat(parts), expected)
    return num_differing, 2 * length


def _chunk(whole: Batch, start: int, end: int) -> Batch:
    """Tokens from `start` to `end` as a step of its own."""
    device = whole.query.device
    start_loc, seq_lens = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, end - start], [end]))
    caches = (whole.key_cache, whole.value_cache)
    return Batch([(end - start, end)], whole.query[start:end], *caches, start_loc, seq_lens, whole.tables, whole.scales)


def _linear(bench: Bench, size: tuple[int, int], scheme: str | None) -> tuple[int, int]:
    """The first rows of many, alone."""
    weight = 0.02 * torch.randn(size, dtype=bench.dtype, device=bench.device)
    packed = pack_linear(weight, None, scheme, is_batch_invariant=True)
    sizes = bench.pick(NUM_ROWS, (1, 2, 18))
    x = torch.randn(sizes[-1], size[1], dtype=bench.dtype, device=bench.device)
    expected = linear(x, packed)
    counts = [count_differing(linear(x[:size].contiguous(), packed), expected[:size]) for size in sizes]
    return sum(counts), sum(sizes)


def _norm(bench: Bench) -> tuple[int, int]:
    size, sizes = bench.pick((4096, NUM_ROWS), (100, (1, 2, 5)))
    x, residual = (torch.randn(sizes[-1], size, dtype=bench.dtype, device=bench.device) for _ in range(2))
    weight = torch.randn(size, dtype=bench.dtype, device=bench.device)
    expected = fused_add_rms_norm(x, residual, weight, 1e-5)[0]
    counts = [
        count_differing(
            fused_add_rms_norm(x[:rows].contiguous(), residual[:rows].contiguous(), weight, 1e-5)[0], expected[:rows]
        )
        for rows in sizes
    ]
    return sum(counts), sum(sizes)


def _sampling(bench: Bench) -> tuple[int, int]:
    """Tokens of the first rows, alone and in other slots; counts of outputs start again each time."""
    vocab_size, sizes = bench.pick((128256, BATCHES), (70, (1, 3)))
    logits = make_logits(bench, sizes[-1], vocab_size)
    state = make_state(bench, sizes[-1], vocab_size, FILTERED.parameters)

    def choose(indices: torch.Tensor) -> torch.Tensor:
        fresh = SamplingState(state.parameters, state.num_outputs.clone(), None)
        return sample_tokens(logits[indices], indices.to(torch.int32), fresh)[0]

    everything = torch.arange(sizes[-1], device=bench.device)
    expected = choose(everything)
    num_differing = num_rows = 0
    for size in sizes:
        for indices in (everything[:size], everything.flip(0)[:size]):
            num_differing += int((choose(indices) != expected[indices]).sum())
            num_rows += size
    return num_differing, num_rows
