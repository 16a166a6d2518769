"""Processing of logits before a draw: masks, bias, penalties, greedy choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llmstack_kernels.argmax import argmax
from llmstack_model_runner.sampling import logit_masks
from llmstack_model_runner.sampling.bitmask import apply_token_bitmask
from llmstack_model_runner.sampling.logits_processor import LogitsProcessors, LogitsRows
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.penalties import apply_penalties


@dataclass(frozen=True, slots=True)
class ProcessedLogits:
    """Logits before temperature and the draw.

    Attributes:
        best: Largest logit of each row.
        token_ids: Argmax of each row.
        is_good: False if no token can be chosen.
        is_all_masked: True if that is for the masks alone; None where there are none.
        random: Parameters of random rows, with temperature 1 if it is already applied.
    """

    logits: torch.Tensor  # [num_rows, vocab_size]
    best: torch.Tensor  # [num_rows]
    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool
    random: RandomRows | None
    is_all_masked: torch.Tensor | None = None  # [num_rows] bool


GreedyChoice = tuple[torch.Tensor, torch.Tensor]
"""The largest logit of each row, and its index; as `argmax` returns them."""


def process_logits(
    logits: torch.Tensor, metadata: SamplingMetadata, greedy: GreedyChoice | None = None
) -> ProcessedLogits:
    """Applies all stages before temperature, in place. `greedy` is the argmax of the logits, if it is known."""
    # Masks may hide NaN.
    largest = argmax(logits)[0] if metadata.has_masks else None
    if metadata.has_changes:
        logits, greedy = _change(logits, metadata), None
    best, token_ids = greedy or argmax(logits)
    is_good = best.isfinite()
    is_all_masked = None
    if largest is not None:
        is_good &= ~largest.isnan()
        is_all_masked = best.isneginf() & largest.isfinite()
    processed = ProcessedLogits(logits, best, token_ids, is_good, metadata.random, is_all_masked)
    processors, rows = metadata.processors, metadata.processor_rows
    if processors is None or rows is None or metadata.random is None or not processors.has_after_temperature:
        return processed
    return _apply_after_temperature(processed, metadata.random, processors, rows)


def _change(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.bitmask is not None:
        apply_token_bitmask(logits, metadata.bitmask)
    if metadata.allowed is not None:
        logit_masks.allow_only(logits, metadata.allowed)
    if metadata.masked_tokens is not None:
        logit_masks.mask(logits, metadata.masked_tokens)
    if metadata.bias is not None:
        logit_masks.add_bias(logits, metadata.bias)
    if metadata.processors is not None and metadata.processor_rows is not None:
        logits = metadata.processors.before_penalties(logits, metadata.processor_rows)
    if metadata.penalties is not None:
        apply_penalties(logits, metadata.penalties)
    if metadata.forced is not None:
        logit_masks.force(logits, metadata.forced)
    return logits


def _apply_after_temperature(
    processed: ProcessedLogits, random: RandomRows, processors: LogitsProcessors, rows: LogitsRows
) -> ProcessedLogits:
    """Applies processors to logits that are divided by the temperature, with 0 as the largest of each row."""
    index = torch.from_numpy(random.rows).to(processed.logits.device)
    temperature = torch.from_numpy(random.temperature).to(index.device)[:, None]
    scaled = (processed.logits[index] - processed.best[index, None]) / temperature
    random_rows = LogitsRows(rows.rows[random.rows], rows.num_output_tokens[random.rows])
    changed = processors.after_temperature(scaled, random_rows)
    processed.logits[index] = changed
    best, token_ids = argmax(changed)
    return replace(
        processed,
        best=processed.best.index_copy(0, index, best),
        token_ids=processed.token_ids.index_copy(0, index, token_ids),
        is_good=processed.is_good.index_copy(0, index, processed.is_good[index] & best.isfinite()),
        random=random.at_temperature_one(),
    )
