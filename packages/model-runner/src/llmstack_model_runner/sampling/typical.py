"""Locally typical sampling (Meister et al., 2023)."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_model_runner.sampling import multinomial
from llmstack_model_runner.sampling.fast_cpu import select

_NUM_BINS = 1024
_BINS_PER_NAT = 32.0


def typical_mask(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """The set of mass >= typical_p whose surprise is nearest to the entropy, ties by id: bool, like `weights`.

    The surprise of a token is minus the logarithm of its probability; its expectation is the entropy. Up to sign and a
    constant, these are the logarithm of the weight and its mean.

    Args:
        weights: Unnormalised probabilities of each row; 0 is never typical. float32 [num_rows, vocab_size]
        typical_p: 1 or more keeps everything. float64 [num_rows]
    """
    mass = multinomial.total_mass(weights)
    mean = multinomial.total_mass(torch.xlogy(weights, weights)) / mass
    distances = weights.log().sub_(mean[:, None].float()).abs_()
    find = _nearest_by_bins if weights.device.type == "cpu" else _nearest_by_sorting
    mask = find(weights, distances, typical_p * mass)
    return (mask & (weights > 0)) | (typical_p >= 1.0)[:, None]


def _nearest_by_sorting(weights: torch.Tensor, distances: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The entries of the smallest distances that reach the target mass: bool, like `weights`."""
    order = distances.sort(dim=-1, stable=True).indices
    cumulative = weights.gather(-1, order).cumsum(dim=-1, dtype=torch.float64)
    num_kept = torch.searchsorted(cumulative, target[:, None]) + 1
    is_kept = torch.arange(weights.shape[-1], device=weights.device) < num_kept
    return torch.empty_like(is_kept).scatter_(-1, order, is_kept)


def _nearest_by_bins(weights: torch.Tensor, distances: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same entries in a third of the time, by sorting only the bin in which the target is reached."""
    num_rows = len(weights)
    # Infinite and undefined distances are in the last bin.
    bins = np.fmin(distances.numpy() * np.float32(_BINS_PER_NAT), np.float32(_NUM_BINS - 1)).astype(np.int64)
    flat = (bins + np.arange(num_rows)[:, None] * _NUM_BINS).ravel()
    masses = np.bincount(flat, weights=weights.numpy().ravel(), minlength=num_rows * _NUM_BINS)
    cumulative = masses.reshape(num_rows, _NUM_BINS).cumsum(axis=1)
    last_bin = np.minimum((cumulative < target.numpy()[:, None]).sum(axis=1), _NUM_BINS - 1)
    before = np.where(last_bin > 0, cumulative[np.arange(num_rows), last_bin - 1], 0.0)
    selected = select(distances.numpy(), bins == last_bin[:, None], padding=np.inf)
    order = selected.values.argsort(axis=1, kind="stable")
    indices = np.take_along_axis(selected.indices, order, axis=1)
    sums = before[:, None] + np.take_along_axis(weights.numpy(), indices, axis=1).cumsum(axis=1, dtype=np.float64)
    num_kept = np.minimum((sums < target.numpy()[:, None]).sum(axis=1) + 1, selected.num_selected)
    mask = bins < last_bin[:, None]
    rows, places = np.nonzero(np.arange(indices.shape[1]) < num_kept[:, None])
    mask[rows, indices[rows, places]] = True
    return torch.from_numpy(mask)
