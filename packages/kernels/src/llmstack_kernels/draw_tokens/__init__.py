"""Random draws: a token per row, with temperature, min-p, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.dispatch import REFERENCE, implementation


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """How the tokens of some rows are drawn; all tensors are contiguous and on the device of the logits.

    Attributes:
        rows: Rows of the logits; distinct.
        temperature: Positive.
        min_p: Least probability relative to the most likely token's; 0 is off.
        top_k: From 1 on; the vocabulary's size or more is off.
        top_p: 1 or more is off.
        uniforms: The numbers that decide, in [0, 1).
    """

    rows: torch.Tensor  # [num_draws] int64
    temperature: torch.Tensor  # [num_draws] float32
    min_p: torch.Tensor  # [num_draws] float32
    top_k: torch.Tensor  # [num_draws] int64
    top_p: torch.Tensor  # [num_draws] float64
    uniforms: torch.Tensor  # [num_draws] float64


def has_kernel(device_type: str) -> bool:
    """Whether more than the reference, which sorts every row, runs on such devices."""
    return implementation("draw_tokens", device_type).__name__ != f"{__name__}.{REFERENCE}"


def draw_tokens(logits: torch.Tensor, best: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """A token per draw: int64 [num_draws].

    The order is temperature, min-p, top-k, top-p, and inversion of the distribution function at the row's number. Sets
    of up to 255 tokens, or 256 under top-k, are inverted from the most likely token down (ties by id), others in the
    order of ids. A row without a largest number gets an arbitrary valid token.

    Args:
        logits: float32, contiguous, left as they are. [num_rows, vocab_size]
        best: Largest logit of each row, not only of those that are drawn. float32 [num_rows]
        parameters: Of the rows that are drawn.

    Raises:
        ValueError: Shapes or types that do not fit.
    """
    if logits.ndim != 2 or not logits.shape[1] or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [num_rows, vocab_size], got {tuple(logits.shape)}.")
    if best.dtype != torch.float32 or best.shape != logits.shape[:1] or not best.is_contiguous():
        raise ValueError(f"best must be contiguous float32 [{len(logits)}], got {best.dtype} {tuple(best.shape)}.")
    if not parameters.temperature.shape == parameters.uniforms.shape == parameters.rows.shape:
        raise ValueError(f"parameters of {len(parameters.rows)} rows must have as many of each kind.")
    drawn: torch.Tensor = implementation("draw_tokens", logits.device.type).draw_tokens(logits, best, parameters)
    return drawn
