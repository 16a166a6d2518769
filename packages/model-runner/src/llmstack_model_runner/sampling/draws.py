"""Random draws, by temperature, the samplers of likely tokens, and infill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.draw_tokens import DrawParameters, draw_tokens, has_kernel
from llmstack_model_runner.sampling import multinomial
from llmstack_model_runner.sampling.fast_cpu import at_least, exponentiate, keep_where
from llmstack_model_runner.sampling.infill import infill_mask
from llmstack_model_runner.sampling.metadata import RandomRows
from llmstack_model_runner.sampling.near_best import near_best_mask
from llmstack_model_runner.sampling.random import uniforms
from llmstack_model_runner.sampling.top_k_top_p import MAX_CANDIDATES, exact_top_k, num_kept, top_k_top_p_mask
from llmstack_model_runner.sampling.typical import typical_mask

_MAX_ENTRIES = 1 << 21
"""Logits processed at once, with temporary tensors of 8 MB. 256 rows of 50,257 in one piece take twice the time, since
each temporary tensor is then allocated by the system."""


def draw(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Token ids of the random rows: int64 [num_random_rows].

    Native code draws on a CPU. A GPU gets here with rows whose sampling the host takes part in.

    Args:
        logits: float32 [num_rows, vocab_size]; not changed.
        best: Largest logit of each row. [num_rows]
        random: Parameters; rows are those of `logits`.
    """
    logits, random = _masked(logits, best, random)
    if not has_kernel(logits.device.type):
        return draw_in_groups(logits, best, random)
    columns = (random.rows, random.temperature, random.min_p, random.top_k, random.top_p)
    numbers = uniforms(random.seeds, random.output_indices)
    parameters = DrawParameters(*[torch.from_numpy(column) for column in (*columns, numbers)])
    return draw_tokens(logits.contiguous(), best.contiguous(), parameters)


def draw_in_groups(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """`draw` by PyTorch, on any device, of rows without top-n-sigma, typical-p and infill.

    A row is drawn from the whole vocabulary, from its top-k candidates, or from its nucleus. The choice depends on the
    row's parameters alone.
    """
    vocab_size = logits.shape[-1]
    is_small = random.top_k <= min(MAX_CANDIDATES, vocab_size - 1)
    is_whole = (random.top_k >= vocab_size) & (random.top_p >= 1.0)
    token_ids = torch.zeros(len(random.rows), dtype=torch.int64, device=logits.device)
    ways = ((is_whole, _draw_whole), (is_small, _draw_top_k), (~is_whole & ~is_small, _draw_nucleus))
    for is_chosen, draw_group in ways:
        for chunk in _chunks(np.flatnonzero(is_chosen), vocab_size):
            group = RandomGroup.make(logits, best, random.select(chunk))
            token_ids[torch.from_numpy(chunk).to(logits.device)] = draw_group(group)
    return token_ids


def probabilities(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """The distributions that `draw` uses: float32 [num_random_rows, vocab_size]."""
    logits, random = _masked(logits, best, random)
    group = RandomGroup.make(logits, best, random)
    weights = group.weights(group.logits)
    if (random.top_k < logits.shape[-1]).any() or (random.top_p < 1.0).any():
        keep_where(weights, top_k_top_p_mask(weights, group.top_k, group.top_p))
    return weights.div_(multinomial.total_mass(weights)[:, None])


@dataclass(frozen=True, slots=True)
class RandomGroup:
    """Logits and parameters of some random rows, on the device."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    best: torch.Tensor  # [num_rows, 1]
    temperature: torch.Tensor  # [num_rows, 1]
    min_p: torch.Tensor  # [num_rows, 1]
    top_k: torch.Tensor  # [num_rows]
    top_p: torch.Tensor  # [num_rows]
    uniforms: torch.Tensor  # [num_rows]
    has_temperature: bool
    has_min_p: bool
    max_top_k: int

    @staticmethod
    def make(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> RandomGroup:
        """Gathers the rows that `random` names."""
        device = logits.device
        rows = torch.from_numpy(random.rows).to(device)
        return RandomGroup(
            # The rows are distinct and ascending, so equal numbers mean all rows.
            logits=logits if len(rows) == len(logits) else logits[rows],
            best=best[rows][:, None],
            temperature=torch.from_numpy(random.temperature).to(device)[:, None],
            min_p=torch.from_numpy(random.min_p).to(device)[:, None],
            top_k=torch.from_numpy(random.top_k).to(device),
            top_p=torch.from_numpy(random.top_p).to(device),
            uniforms=torch.from_numpy(uniforms(random.seeds, random.output_indices)).to(device),
            has_temperature=bool((random.temperature != 1.0).any()),
            has_min_p=bool(random.min_p.any()),
            max_top_k=int(random.top_k.max()),
        )

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities relative to the most likely token's; 0 below min-p.

        The maximum is subtracted before the division by the temperature, so that no temperature overflows.
        """
        weights = logits - self.best
        if self.has_temperature:
            weights /= self.temperature
        exponentiate(weights)
        if self.has_min_p:
            keep_where(weights, at_least(weights, self.min_p))
        return weights


def _draw_whole(group: RandomGroup) -> torch.Tensor:
    return multinomial.invert(group.weights(group.logits), group.uniforms)


def _best_candidates(group: RandomGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best tokens of each row, their weights, the sums of these, and how many top-k and top-p leave."""
    values, token_ids = exact_top_k(group.logits, group.max_top_k)
    weights = group.weights(values)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative.gather(-1, (group.top_k - 1)[:, None]).squeeze(-1)
    return token_ids, weights, cumulative, num_kept(cumulative, group.top_k, group.top_p, total)


def _draw_top_k(group: RandomGroup) -> torch.Tensor:
    token_ids, _, cumulative, kept = _best_candidates(group)
    chosen = multinomial.invert_prefix(cumulative, kept, group.uniforms)
    return token_ids.gather(-1, chosen[:, None]).squeeze(-1)


def _draw_nucleus(group: RandomGroup) -> torch.Tensor:
    """Looks for the nucleus among the best candidates; only rows with a larger one are sorted."""
    all_weights = group.weights(group.logits)
    values, token_ids = exact_top_k(group.logits, MAX_CANDIDATES)
    cumulative = group.weights(values).cumsum(dim=-1, dtype=torch.float64)
    kept = num_kept(cumulative, group.top_k, group.top_p, multinomial.total_mass(all_weights))
    chosen = multinomial.invert_prefix(cumulative, kept, group.uniforms)
    result = token_ids.gather(-1, chosen[:, None]).squeeze(-1)
    # At full width the nucleus may be larger. A row with top-k has another mass that top-p refers to.
    is_larger = (kept == cumulative.shape[-1]) | (group.top_k < group.logits.shape[-1])
    rows = is_larger.nonzero().squeeze(-1)
    if len(rows):
        kept_weights = all_weights[rows]
        keep_where(kept_weights, top_k_top_p_mask(kept_weights, group.top_k[rows], group.top_p[rows]))
        result[rows] = multinomial.invert(kept_weights, group.uniforms[rows])
    return result


def _masked(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> tuple[torch.Tensor, RandomRows]:
    """The logits with minus infinity outside of what top-n-sigma, typical-p and infill keep; a copy if a row has one.

    Infill comes after min-p, top-k and top-p, which its rows no longer have in the parameters that are returned.
    """
    given = logits
    for is_chosen, mask in ((random.top_n_sigma > 0.0, _near_best), (random.typical_p < 1.0, _typical)):
        chosen = np.flatnonzero(is_chosen)
        if len(chosen) and logits is given:
            logits = logits.clone()
        for chunk in _chunks(chosen, logits.shape[-1]):
            part = random.select(chunk)
            group = RandomGroup.make(logits, best, part)
            kept = mask(group, part)
            logits[torch.from_numpy(part.rows).to(logits.device)] = group.logits.masked_fill(~kept, -torch.inf)
    chosen = np.flatnonzero(random.infill_rules.astype(np.bool_))
    if not len(chosen):
        return logits, random
    if logits is given:
        logits = logits.clone()
    for chunk in _chunks(chosen, logits.shape[-1]):
        part = random.select(chunk)
        logits[torch.from_numpy(part.rows).to(logits.device)] = _infilled(RandomGroup.make(logits, best, part), part)
    return logits, random.without_limits(chosen, logits.shape[-1])


def _near_best(group: RandomGroup, random: RandomRows) -> torch.Tensor:
    return near_best_mask(group.logits, group.best, torch.from_numpy(random.top_n_sigma).to(group.logits.device))


def _typical(group: RandomGroup, random: RandomRows) -> torch.Tensor:
    return typical_mask(group.weights(group.logits), torch.from_numpy(random.typical_p).to(group.logits.device))


def _infilled(group: RandomGroup, random: RandomRows) -> torch.Tensor:
    """The logits of the group with minus infinity outside of what infill keeps of its candidates."""
    token_ids, weights, _, num_candidates = _best_candidates(group)
    weights[torch.arange(weights.shape[-1], device=weights.device) >= num_candidates[:, None]] = 0.0
    kept, is_single = infill_mask(token_ids, weights, group.logits, random.infill_rules.tolist())
    # The only token of a row may be so far below the best one that its weight would be 0.
    logits = torch.where(is_single[:, None], group.best, group.logits)
    return logits.masked_fill(~kept, -torch.inf)


def _chunks(index: npt.NDArray[np.int64], vocab_size: int) -> Iterator[npt.NDArray[np.int64]]:
    size = max(1, _MAX_ENTRIES // vocab_size)
    return (index[start : start + size] for start in range(0, len(index), size))
