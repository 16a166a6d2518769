"""Top-k and top-p sets with exact ties: lower token ids first."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling.fast_cpu import select_largest

MAX_CANDIDATES = 256
"""Rows with a set of at most this size are sampled from their best candidates, others from the sorted vocabulary.

The choice depends on the row alone. Selecting 256 of 50,257 costs a fortieth of sorting them.
"""


def exact_top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row, best first, ties by index: (values, indices), both [num_rows, k].

    `torch.topk` does not specify the choice and order of equal values, and logits of bfloat16 models have many ties.
    """
    k = min(k, values.shape[-1])
    if values.device.type != "cpu":
        return _top_k_by_keys(values, k)
    selected = select_largest(values, k) if k else None
    if selected is not None:
        candidates, indices = selected
        top, order = candidates.sort(dim=-1, descending=True, stable=True)
        return top[:, :k], indices.gather(-1, order[:, :k])
    top, indices = torch.topk(values, min(k + 1, values.shape[-1]), dim=-1)
    if top.shape[-1] > k:
        is_cut = top[:, k] == top[:, k - 1]
        top, indices = top[:, :k], indices[:, :k]
        if bool(is_cut.any()):
            indices = indices.contiguous()
            rows = is_cut.nonzero().squeeze(-1)
            indices[rows] = _repair_cut(values[rows], top[rows], indices[rows])
    return _order_ties(values, indices)


def _top_k_by_keys(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`exact_top_k` without reading from the device: value and index form one integer key, so that no ties exist."""
    bits = (values + 0.0).view(torch.int32)  # maps -0.0 to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # ordered as the values are
    num_values = values.shape[-1]
    places = torch.arange(num_values - 1, -1, -1, device=values.device)
    keys = torch.topk(ordered * num_values + places, k, dim=-1).values
    indices = num_values - 1 - keys.remainder(num_values)
    return values.gather(-1, indices), indices


def _order_ties(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices = indices.sort(dim=-1).values
    top, order = values.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
    return top, indices.gather(-1, order)


def _repair_cut(values: torch.Tensor, top: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Chooses the lowest indices if the k-th value occurs beyond k too; `top` is sorted, the result is not."""
    threshold = top[:, -1:]
    rows, candidates = (values == threshold).nonzero(as_tuple=True)
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    num_greater = (top > threshold).sum(dim=-1)
    is_taken = rank < top.shape[-1] - num_greater[rows]
    rows, candidates, rank = rows[is_taken], candidates[is_taken], rank[is_taken]
    indices = indices.clone()
    indices[rows, num_greater[rows] + rank] = candidates
    return indices


def num_kept(cumulative: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Size of the smallest prefix whose mass reaches top_p of `total`, at most top_k and at least 1: [num_rows].

    A result of the full width may mean that there are too few candidates.

    Args:
        cumulative: Cumulative sums of the candidates' weights, best first, float64. [num_rows, width]
        top_k: At least 1. [num_rows]
        top_p: 1 or more keeps everything. [num_rows]
        total: Mass that top_p refers to, float64. [num_rows]
    """
    width = cumulative.shape[-1]
    kept = torch.searchsorted(cumulative, (top_p * total)[:, None]).squeeze(-1) + 1
    kept = kept.where(top_p < 1.0, width)
    return torch.minimum(kept, top_k).clamp_(1, width)


def top_k_top_p_mask(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of mass >= top_p within the top-k set: bool, like `weights`.

    Sorts each row, which pays off for rows whose set may be large.
    """
    ordered = _sort_descending(weights)
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative.gather(-1, (top_k - 1)[:, None]).squeeze(-1)
    kept = num_kept(cumulative, top_k, top_p, total)
    threshold = ordered.gather(-1, (kept - 1)[:, None])
    mask = weights >= threshold
    num_surplus = mask.sum(dim=-1) - kept
    rows = (num_surplus > 0).nonzero().squeeze(-1)
    if len(rows):  # If more tokens tie with the last one than fit, those with the highest ids are dropped.
        is_equal = weights[rows] == threshold[rows]
        num_equal_kept = is_equal.sum(dim=-1) - num_surplus[rows]
        mask[rows] &= ~is_equal | (is_equal.cumsum(dim=-1) <= num_equal_kept[:, None])
    return mask


def _sort_descending(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type != "cpu":
        return weights.sort(dim=-1, descending=True).values
    # numpy sorts plain values with SIMD, in a quarter of the time of torch, which sorts indices too.
    ordered = weights.numpy().copy()
    ordered.sort(axis=-1)
    return torch.from_numpy(ordered).flip(-1)
