"""Changes to single logits that a request asks for: bias, allowed tokens, and tokens barred until `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

TokenIds = npt.NDArray[np.int64]


def apply_allowed_token_ids(logits: torch.Tensor, allowed: Sequence[tuple[int, TokenIds]]) -> None:
    """Sets all but the allowed tokens of each (row, token ids) to minus infinity, in place."""
    rows, columns = _flat_index(allowed, logits.device)
    kept = logits[rows, columns]
    logits[torch.tensor([row for row, _ in allowed], device=logits.device)] = -torch.inf
    logits[rows, columns] = kept


def apply_logit_bias(logits: torch.Tensor, biases: Sequence[tuple[int, TokenIds, npt.NDArray[np.float32]]]) -> None:
    """Adds each (row, token ids, values) in place; the token ids of a row are distinct."""
    rows, columns = _flat_index([(row, token_ids) for row, token_ids, _ in biases], logits.device)
    values = torch.from_numpy(np.concatenate([values for _, _, values in biases])).to(logits.device)
    logits[rows, columns] += values


def bar_token_ids(logits: torch.Tensor, barred: Sequence[tuple[int, TokenIds]]) -> None:
    """Sets the given tokens of each (row, token ids) to minus infinity, in place."""
    logits[_flat_index(barred, logits.device)] = -torch.inf


def _flat_index(entries: Sequence[tuple[int, TokenIds]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [len(token_ids) for _, token_ids in entries]
    rows = np.repeat(np.array([row for row, _ in entries], dtype=np.int64), lengths)
    columns = np.concatenate([token_ids for _, token_ids in entries])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
