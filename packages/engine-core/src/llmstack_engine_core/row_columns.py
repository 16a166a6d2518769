"""The rows of a step by columns, which are cheap to keep and to send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, overload

from llmstack_types import ScheduledRequest

# Calling the class, a function of Python around this, takes twice as long.
_make_row: Final = partial(tuple.__new__, ScheduledRequest)
_NONE: Final[Mapping[int, Any]] = MappingProxyType({})


class RowColumns(Sequence[ScheduledRequest]):
    """Rows of a step, each made when it is read. Code that reads all of them often makes a list first.

    Attributes:
        new_block_ids: By the index of their row, since few rows have any; so are `draft_token_ids`.
    """

    __slots__ = ("draft_token_ids", "new_block_ids", "num_computed_tokens", "num_scheduled_tokens", "request_ids")

    def __init__(
        self,
        request_ids: Sequence[str] = (),
        num_computed_tokens: Sequence[int] = (),
        num_scheduled_tokens: Sequence[int] = (),
        new_block_ids: Mapping[int, list[int]] = _NONE,
        draft_token_ids: Mapping[int, Sequence[int]] = _NONE,
    ) -> None:
        self.request_ids = request_ids
        self.num_computed_tokens = num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens
        self.new_block_ids = new_block_ids
        self.draft_token_ids = draft_token_ids

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> RowColumns:
        """Takes rows apart, unless they are."""
        if isinstance(rows, RowColumns):
            return rows
        if not rows:
            return cls()
        request_ids, computed, scheduled, blocks, drafts = zip(*rows, strict=True)
        return cls(
            request_ids, computed, scheduled,
            {index: ids for index, ids in enumerate(blocks) if ids} if any(blocks) else _NONE,
            {index: ids for index, ids in enumerate(drafts) if ids} if any(drafts) else _NONE,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return map(_make_row, zip(
            self.request_ids, self.num_computed_tokens, self.num_scheduled_tokens,
            self._column(self.new_block_ids, []), self._column(self.draft_token_ids, ()), strict=True,
        ))  # fmt: skip

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScheduledRequest]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | list[ScheduledRequest]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        """Whether the rows are the same; an empty list and an empty tuple are."""
        return isinstance(other, Sequence) and self._values() == RowColumns.of(other)._values()

    __hash__ = None  # type: ignore[assignment]  # equal to a list of the same rows, which has none

    def _values(self) -> tuple[object, ...]:
        sparse = [{key: list(ids) for key, ids in one.items()} for one in (self.new_block_ids, self.draft_token_ids)]
        return list(self.request_ids), list(self.num_computed_tokens), list(self.num_scheduled_tokens), *sparse

    def _column(self, index_to_values: Mapping[int, Sequence[int]], empty: Sequence[int]) -> list[Sequence[int]]:
        column = [empty] * len(self.request_ids)  # one object for all rows without any: they are read only
        for index, values in index_to_values.items():
            column[index] = values
        return column
