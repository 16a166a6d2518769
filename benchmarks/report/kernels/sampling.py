"""The choice of tokens, beside one read of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.sample_tokens import RowParameters, SamplingState, sample_tokens
from report.bench import Bench
from report.rows import Row
from report.timing import num_copies, time_calls

VOCABULARIES = {"128k": 128256, "50k": 50257}
NUM_ROWS = (256, 64, 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """How rows choose; `name` ends the row's."""

    name: str
    parameters: RowParameters


# What the target is about: everything that most requests ask for at once.
FILTERED = Kind("", RowParameters(temperature=0.8, top_k=50, top_p=0.9, seed=7))
KINDS = (
    FILTERED,
    Kind(", greedy", RowParameters()),
    Kind(", temperature alone", RowParameters(temperature=1.0, seed=7)),
    Kind(", top-p 0.95", RowParameters(temperature=1.0, top_p=0.95, seed=7)),
    Kind(", penalties", RowParameters(temperature=0.8, top_p=0.9, frequency=0.5, repetition=1.1, seed=7)),
)


def run(bench: Bench) -> None:
    """Each kind at each size, beside the `topk`-and-`multinomial` that one would write in PyTorch."""
    for vocab_name, vocab_size in VOCABULARIES.items():
        for num_rows in bench.pick(NUM_ROWS, NUM_ROWS[1:2] if vocab_name != "128k" else NUM_ROWS[:1]):
            for kind in KINDS if num_rows != NUM_ROWS[1] else KINDS[:2]:
                title = f"sampling, {num_rows} x {vocab_name}{kind.name}"
                size = bench.pick((num_rows, vocab_size), (1, 70))
                bench.attempt(title, "us", partial(_measure, bench, title, *size, kind))
    size = bench.pick((256, VOCABULARIES["128k"]), (1, 70))
    title = "sampling, 256 x 128k, sort in PyTorch"
    bench.attempt(title, "us", lambda: _row(bench, title, *size, _sorted))


def make_logits(bench: Bench, num_rows: int, vocab_size: int) -> torch.Tensor:
    """float32, spread as a model's are."""
    return 3 * torch.randn(num_rows, vocab_size, dtype=torch.float32, device=bench.device)


def make_state(bench: Bench, num_rows: int, vocab_size: int, parameters: RowParameters) -> SamplingState:
    """Rows that all choose alike, but for their seeds."""
    words = torch.tensor([parameters.words()] * num_rows, dtype=torch.int64)
    outputs = torch.arange(num_rows, dtype=torch.int64)
    counts = torch.randint(0, 3, (num_rows, vocab_size), dtype=torch.int32) if parameters.has_penalties else None
    moved = [None if tensor is None else tensor.to(bench.device) for tensor in (words, outputs, counts)]
    return SamplingState(moved[0], moved[1], moved[2])


def _measure(bench: Bench, title: str, num_rows: int, vocab_size: int, kind: Kind) -> Row:
    state = make_state(bench, num_rows, vocab_size, kind.parameters)
    rows = torch.arange(num_rows, dtype=torch.int32, device=bench.device)
    flags = {"has_random": kind.parameters.temperature > 0, "has_penalties": kind.parameters.has_penalties}

    def choose(logits: torch.Tensor) -> object:
        return sample_tokens(logits, rows, state, **flags)

    return _row(bench, title, num_rows, vocab_size, choose, is_headline=kind is FILTERED)


def _row(
    bench: Bench,
    title: str,
    num_rows: int,
    vocab_size: int,
    choose: Callable[[torch.Tensor], object],
    *,
    is_headline: bool = False,
) -> Row:
    """The bound is the time of reading all logits once at the ceiling."""
    num_bytes = 4 * num_rows * vocab_size
    sets = [make_logits(bench, num_rows, vocab_size) for _ in range(min(16, num_copies(bench, num_bytes)))]
    calls = [partial(choose, logits) for logits in sets]
    timing = time_calls(bench, calls, is_headline=is_headline)
    rate = bench.read_rate()
    bound = None if rate is None else num_bytes / rate * 1e6
    return Row(title, "us", timing.median_s * 1e6, bound, timing.spread)


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    """Top-k and top-p by a full sort, without synchronising."""
    values, ids = (logits / 0.8).sort(descending=True)
    probabilities = values.softmax(-1)
    is_out = probabilities.cumsum(-1) - probabilities > 0.9
    is_out[:, 50:] = True
    probabilities = probabilities.masked_fill(is_out, 0.0)
    # An exponential race: `multinomial` would wait for the device.
    chosen = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, chosen)
