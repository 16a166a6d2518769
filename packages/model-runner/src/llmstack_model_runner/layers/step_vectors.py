"""Vectors that stand in a step's tokens in place of those of their ids."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepVectors(NamedTuple):
    """Some of a step's tokens, and their vectors in the type of the model; on the device of its embedding.

    Every rank that embeds has all of them: they go in after the parts of a table are added up.
    """

    places: torch.Tensor  # [num_places] int64, flat tokens of the step
    vectors: torch.Tensor  # [num_places, size]
