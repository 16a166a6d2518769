"""A layer of an encoder, whole or in slices of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_model_runner.encoders.rotation import rotate_queries_and_keys

_ROWS_OF_REST = 3
"""The rest of a layer costs a row so many times what its queries, keys and values do."""


class RowLayer(Protocol):
    """A layer whose rows depend on each other through attention alone."""

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [num_rows, 3, num_heads, head_dim] of some rows [num_rows, size]."""
        ...

    def join(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rows behind the layer, from the output of attention, [num_rows, num_heads * head_dim]."""
        ...


class LayerRun(NamedTuple):
    """A layer over the rows of one item.

    Attributes:
        starts: Of the rows that attend to each other, and their end.
        angles: Of each row, [num_rows, head_dim / 2], where queries and keys are rotated.
    """

    layer: RowLayer
    starts: Sequence[int]
    angles: torch.Tensor | None = None

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All rows behind the layer, [num_rows, size]."""
        query, key, value = self._project(hidden, slice(None)).unbind(1)
        return self.layer.join(hidden, self._attend(query, key, value, 0))

    def begin(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for queries, keys and values of all rows, and for these behind the layer."""
        shape = self.layer.project(hidden[:1]).shape[1:]
        return hidden.new_empty((len(hidden), *shape)), torch.empty_like(hidden)

    def fill(
        self, hidden: torch.Tensor, projected: torch.Tensor, behind: torch.Tensor, index: int, num_slices: int
    ) -> None:
        """Computes slice `index` into what `begin` made.

        Slices cost about the same each: the first ones make queries, keys and values of all rows, the others the rest.
        Which rows a slice has depends on their number alone, so bits are the same in whatever steps it is computed.
        A slice that is computed again writes what it wrote.
        """
        to_project, to_join = rows_of_slice(len(hidden), index, num_slices)
        if to_project:
            rows = slice(to_project.start, to_project.stop)
            projected[rows] = self._project(hidden[rows], rows)
        if to_join:
            rows = slice(to_join.start, to_join.stop)
            query, key, value = projected.unbind(1)
            attended = self._attend(query[rows], key, value, to_join.start)
            behind[rows] = self.layer.join(hidden[rows], attended)

    def _project(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        projected = self.layer.project(hidden)
        return projected if self.angles is None else rotate_queries_and_keys(projected, self.angles[rows])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int) -> torch.Tensor:
        return bidirectional_attention(query, key, value, self.starts, self.layer.scale, first).flatten(1)


def rows_of_slice(num_rows: int, index: int, num_slices: int) -> tuple[range, range]:
    """The rows that a slice projects, and the rows that it joins; over all slices each row once."""
    bounds = [number * num_rows * (1 + _ROWS_OF_REST) // num_slices for number in (index, index + 1)]
    to_project = [min(bound, num_rows) for bound in bounds]
    to_join = [max(bound - num_rows, 0) // _ROWS_OF_REST for bound in bounds]
    return range(*to_project), range(*to_join)
