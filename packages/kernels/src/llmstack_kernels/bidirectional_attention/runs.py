"""Pieces of the rows of a call; one launch computes a piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """Neighbouring queries of neighbouring rows of one length.

    Attributes:
        query_start: The first query, among those of the call; each row has `num_queries` of them.
        key_start: The first key of the first row, among those of the call; each row has `length` of them.
    """

    query_start: int
    key_start: int
    num_rows: int
    num_queries: int
    length: int


def pieces(query_start_loc_list: Sequence[int], first_query: int, num_queries: int) -> Iterator[Piece]:
    """All queries of a call in as few pieces as there are: rows of one length whole, or one row in part."""
    if num_queries == query_start_loc_list[-1]:
        for start, num_rows, length in runs_of_one_length(query_start_loc_list):
            if length:
                yield Piece(start, start, num_rows, length, length)
        return
    row = bisect_right(query_start_loc_list, first_query) - 1
    begin, end = first_query, first_query + num_queries
    while begin < end:
        start, row_end = query_start_loc_list[row : row + 2]
        stop = min(row_end, end)
        if stop > begin:
            yield Piece(begin - first_query, start, 1, stop - begin, row_end - start)
        begin, row = stop, row + 1


def runs_of_one_length(query_start_loc_list: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First token, number of rows and their length, of each run of neighbouring rows that are equally long."""
    start = 0
    for length, rows in groupby(end - begin for begin, end in pairwise(query_start_loc_list)):
        num_rows = len(list(rows))
        yield start, num_rows, length
        start += num_rows * length
