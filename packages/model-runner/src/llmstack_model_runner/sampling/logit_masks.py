"""Changes of single logits: bias, allowed tokens and masked tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Single entries of the logits, row by row; parallel arrays."""

    rows: IntArray  # [num_entries]
    token_ids: IntArray  # [num_entries]

    @staticmethod
    def concatenate(parts: Iterable[tuple[int, IntArray]]) -> TokenEntries:
        """Builds the arrays from one pair of (row, token ids) per row of the logits."""
        rows, token_ids = zip(*parts, strict=True)
        lengths = [len(one) for one in token_ids]
        return TokenEntries(np.repeat(np.array(rows, dtype=np.int64), lengths), np.concatenate(token_ids))

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns for indexing a tensor."""
        return torch.from_numpy(self.rows).to(device), torch.from_numpy(self.token_ids).to(device)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values to add to distinct entries."""

    entries: TokenEntries
    values: npt.NDArray[np.float32]  # [num_entries]


def allow_only(logits: torch.Tensor, allowed: TokenEntries) -> None:
    """Sets all other tokens of the entries' rows to minus infinity, in place."""
    index = allowed.index(logits.device)
    kept = logits[index]
    logits[torch.from_numpy(np.unique(allowed.rows)).to(logits.device)] = -torch.inf
    logits[index] = kept


def force(logits: torch.Tensor, forced: TokenEntries) -> None:
    """Leaves each entry as the only token of its row, in place; there is one entry per row."""
    index = forced.index(logits.device)
    logits[index[0]] = -torch.inf
    logits[index] = 0.0


def add_bias(logits: torch.Tensor, bias: LogitBias) -> None:
    """Adds the values to the logits, in place."""
    logits[bias.entries.index(logits.device)] += torch.from_numpy(bias.values).to(logits.device)


def mask(logits: torch.Tensor, entries: TokenEntries) -> None:
    """Sets the entries to minus infinity, in place."""
    logits[entries.index(logits.device)] = -torch.inf
