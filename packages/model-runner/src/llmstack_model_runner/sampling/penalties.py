"""Repetition, frequency and presence penalties over the tokens that a request has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MIN_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one request and how often each was generated; grows by a token per step.

    Sparse: work and memory go with the tokens seen, not with the vocabulary.
    """

    __slots__ = ("_output_counts", "_positions", "_token_ids")

    def __init__(self, token_ids: npt.NDArray[np.int64], num_prompt_tokens: int) -> None:
        """Counts the known tokens: those of the prompt as seen, later ones as generated."""
        seen = np.unique(token_ids)
        self._positions = {int(token_id): position for position, token_id in enumerate(seen)}
        capacity = len(seen) + _MIN_CAPACITY
        self._token_ids = np.zeros(capacity, dtype=np.int64)
        self._token_ids[: len(seen)] = seen
        self._output_counts = np.zeros(capacity, dtype=np.float32)
        np.add.at(self._output_counts, np.searchsorted(seen, token_ids[num_prompt_tokens:]), 1.0)

    def add(self, token_id: int) -> None:
        """Counts one generated token."""
        position = self._positions.setdefault(token_id, len(self._positions))
        if position == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
        self._token_ids[position] = token_id
        self._output_counts[position] += 1.0

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._token_ids[: len(self._positions)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often each of `token_ids` was generated; 0 for tokens of the prompt alone."""
        return self._output_counts[: len(self._positions)]


@dataclass(frozen=True, slots=True)
class PenaltyRow:
    """One row of the logits that is penalised."""

    row: int
    counts: TokenCounts
    repetition: float
    frequency: float
    presence: float


def apply_penalties(logits: torch.Tensor, penalties: Sequence[PenaltyRow]) -> None:
    """Penalises logits in place, at the tokens seen.

    Repetition (Keskar et al., 2019) divides positive and multiplies negative logits of tokens in prompt or output;
    frequency subtracts per occurrence in the output, presence once; the latter two as the OpenAI API defines them.
    """
    lengths = [len(penalty.counts.token_ids) for penalty in penalties]

    def flat(values: list[float] | list[int], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), lengths)).to(logits.device)

    rows = flat([penalty.row for penalty in penalties], np.int64)
    columns = torch.from_numpy(np.concatenate([penalty.counts.token_ids for penalty in penalties])).to(rows.device)
    counts = torch.from_numpy(np.concatenate([penalty.counts.output_counts for penalty in penalties])).to(rows.device)
    repetition = flat([penalty.repetition for penalty in penalties], np.float32)
    seen = logits[rows, columns]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= flat([penalty.frequency for penalty in penalties], np.float32) * counts
    seen -= flat([penalty.presence for penalty in penalties], np.float32) * (counts > 0)
    logits[rows, columns] = seen
