"""Chooses one token per row of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmstack_model_runner.sampling import logit_masks, multinomial
from llmstack_model_runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.penalties import apply_penalties
from llmstack_model_runner.sampling.random import uniforms
from llmstack_model_runner.sampling.top_k_top_p import MAX_CANDIDATES, exact_top_k, num_kept, top_k_top_p_mask


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The chosen tokens, on the device.

    Attributes:
        is_good: False where no token can be chosen: logits that are not numbers, or no token allowed. The token
            id means nothing there.
        logprob_rows: The rows that `logprobs` is about.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    is_good: torch.Tensor  # [num_rows] bool
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None


class Sampler:
    """Stateless; all rows at once.

    The order is: allowed tokens, logit bias, tokens barred until `min_tokens`, penalties (repetition, frequency,
    presence), then greedy choice; or temperature, min-p, top-k, top-p and the draw. Log-probabilities are those of the
    logits before all of it.
    """

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Chooses a token per row.

        Args:
            logits: float32 [num_rows, vocab_size]; left as it is.
            metadata: Names rows of `logits`.
        """
        processed = process_logits(logits, metadata)
        # The first of several maxima, and NaN if there is any.
        best, token_ids = processed.max(dim=-1)
        is_good = best.isfinite()
        if metadata.has_changes:  # Masks may hide what is not a number.
            is_good &= ~logits.amax(dim=-1).isnan()
        if metadata.random is not None:
            rows = torch.from_numpy(metadata.random.rows).to(logits.device)
            token_ids[rows] = _draw(processed, best, rows, metadata.random)
        if not metadata.logprobs:
            return SamplerOutput(token_ids, is_good)
        logprob_rows = [row for row, _ in metadata.logprobs]
        logprobs = gather_logprobs(
            logits[logprob_rows], token_ids[logprob_rows], [num_top for _, num_top in metadata.logprobs]
        )
        return SamplerOutput(token_ids, is_good, tuple(logprob_rows), logprobs)


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The logits after everything that comes before temperature: the same tensor where nothing changes, or a copy."""
    if not metadata.has_changes:
        return logits
    logits = logits.clone()
    if metadata.allowed_token_ids:
        logit_masks.apply_allowed_token_ids(logits, metadata.allowed_token_ids)
    if metadata.logit_bias:
        logit_masks.apply_logit_bias(logits, metadata.logit_bias)
    if metadata.barred_token_ids:
        logit_masks.bar_token_ids(logits, metadata.barred_token_ids)
    if metadata.penalties:
        apply_penalties(logits, metadata.penalties)
    return logits


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Token ids of the random rows: [num_random_rows].

    Three ways, by what a row asks for alone: from the whole vocabulary; from its top-k candidates; from its nucleus.
    """
    vocab_size = logits.shape[-1]
    is_small = random.top_k <= min(MAX_CANDIDATES, vocab_size - 1)
    is_whole = (random.top_k >= vocab_size) & (random.top_p >= 1.0)
    token_ids = torch.zeros_like(rows)
    for is_chosen, draw in ((is_whole, _draw_whole), (is_small, _draw_top_k), (~is_whole & ~is_small, _draw_nucleus)):
        if is_chosen.any():
            chosen = torch.from_numpy(np.flatnonzero(is_chosen)).to(rows.device)
            group = _RandomGroup.make(logits, best, rows[chosen], random.select(is_chosen))
            token_ids[chosen] = draw(group)
    return token_ids


@dataclass(frozen=True, slots=True)
class _RandomGroup:
    """Random rows of one kind, on the device."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    best: torch.Tensor  # [num_rows, 1]
    temperature: torch.Tensor  # [num_rows, 1]
    min_p: torch.Tensor  # [num_rows, 1]
    top_k: torch.Tensor  # [num_rows]
    top_p: torch.Tensor  # [num_rows]
    uniforms: torch.Tensor  # [num_rows]
    has_min_p: bool
    max_top_k: int

    @staticmethod
    def make(logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, random: RandomRows) -> _RandomGroup:
        device = logits.device
        is_all = len(rows) == len(logits)
        return _RandomGroup(
            logits=logits if is_all else logits[rows],
            best=best[rows][:, None],
            temperature=torch.from_numpy(random.temperature).to(device)[:, None],
            min_p=torch.from_numpy(random.min_p).to(device)[:, None],
            top_k=torch.from_numpy(random.top_k).to(device),
            top_p=torch.from_numpy(random.top_p).to(device),
            uniforms=torch.from_numpy(uniforms(random.seeds, random.output_indices)).to(device),
            has_min_p=bool(random.min_p.any()),
            max_top_k=int(random.top_k.max()),
        )

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities relative to the most likely token's, 0 below min-p.

        The maximum is subtracted before the temperature divides, so that no temperature overflows.
        """
        weights = ((logits - self.best) / self.temperature).exp_()
        if self.has_min_p:
            weights.masked_fill_(weights < self.min_p, 0.0)
        return weights


def _draw_whole(group: _RandomGroup) -> torch.Tensor:
    return multinomial.invert(group.weights(group.logits), group.uniforms)


def _draw_top_k(group: _RandomGroup) -> torch.Tensor:
    values, token_ids = exact_top_k(group.logits, group.max_top_k)
    cumulative = group.weights(values).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative.gather(-1, (group.top_k - 1)[:, None]).squeeze(-1)
    kept = num_kept(cumulative, group.top_k, group.top_p, total)
    chosen = multinomial.invert_prefix(cumulative, kept, group.uniforms)
    return token_ids.gather(-1, chosen[:, None]).squeeze(-1)


def _draw_nucleus(group: _RandomGroup) -> torch.Tensor:
    """The nucleus is sought among the best candidates first; only rows with a larger one are sorted."""
    all_weights = group.weights(group.logits)
    values, token_ids = exact_top_k(group.logits, MAX_CANDIDATES)
    cumulative = group.weights(values).cumsum(dim=-1, dtype=torch.float64)
    kept = num_kept(cumulative, group.top_k, group.top_p, multinomial.total_mass(all_weights))
    chosen = multinomial.invert_prefix(cumulative, kept, group.uniforms)
    result = token_ids.gather(-1, chosen[:, None]).squeeze(-1)
    # Full width: the nucleus may be larger. A top-k of its own changes the mass that top-p refers to.
    is_larger = (kept == cumulative.shape[-1]) | (group.top_k < group.logits.shape[-1])
    rows = is_larger.nonzero().squeeze(-1)
    if len(rows):
        kept_weights = all_weights[rows]
        kept_weights *= top_k_top_p_mask(kept_weights, group.top_k[rows], group.top_p[rows])
        result[rows] = multinomial.invert(kept_weights, group.uniforms[rows])
    return result
