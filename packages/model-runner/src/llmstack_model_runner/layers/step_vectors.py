"""Vectors in place of token embeddings: prompt embeddings and encoded items."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Tokens of a row that attend to each other and to all before them, such as those of a picture in some models.

    Attributes:
        row: Its place among the rows of the step.
        first_token: Of its tokens in the step, among the flat ones.
        first_position: That token's place in its row; later than the block's own beginning behind a prefix hit.
        end_position: The place behind the block.
    """

    row: int
    first_token: int
    first_position: int
    end_position: int


class StepVectors(NamedTuple):
    """Some of a step's tokens, and their vectors in the type of the model; on the device of its embedding.

    Every rank that embeds has all of them: they go in after the parts of a table are added up.

    Attributes:
        axes: Positions of the places, where those of a token are not all equal.
        deep: What is added to the hidden states of the places behind the first decoder layers; of these tensors, each
            has the shape of `vectors`.
    """

    places: torch.Tensor  # [num_places] int64, flat tokens of the step
    vectors: torch.Tensor  # [num_places, size]
    blocks: tuple[Block, ...] = ()
    axes: torch.Tensor | None = None  # [3, num_places] int64
    deep: tuple[torch.Tensor, ...] = ()

    def add_deep(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, size] behind decoder layer `number`, with what is added there."""
        return hidden if number >= len(self.deep) else hidden.index_add(0, self.places, self.deep[number])
