"""Causal convolution in plain PyTorch, which defines what every backend computes."""

from __future__ import annotations

import torch

from llmstack_kernels.state_rows import StateRows


def causal_convolution(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: StateRows,
    activation: str,
) -> torch.Tensor:
    """Each row is laid behind its tail, so that no token needs a case of its own."""
    length, num_channels = taps.shape
    places, tail_places, new_tail_places = rows.places(length - 1)
    padded = inputs.new_empty(len(inputs) + tail_places.numel(), num_channels)
    padded.index_copy_(0, places, inputs)
    padded.index_copy_(0, tail_places.view(-1), tails.index_select(0, rows.sources).view(-1, num_channels))
    total = padded.index_select(0, places - (length - 1)).float() * taps[0]
    for tap in range(1, length):
        total += padded.index_select(0, places - (length - 1 - tap)).float() * taps[tap]
    if bias is not None:
        total += bias
    new_tails = padded.index_select(0, new_tail_places.view(-1))
    tails.index_copy_(0, rows.targets, new_tails.view(-1, *tails.shape[1:]))
    if activation == "silu":
        # PyTorch's functions have other bits for the last numbers of a tensor, so no tensor may hold several tokens.
        total = torch.stack([token * torch.sigmoid(token) for token in total])
    return total.to(inputs.dtype)
