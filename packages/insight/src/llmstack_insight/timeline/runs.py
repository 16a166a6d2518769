"""Runs: consecutive steps in which a request did the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import StepRecord

PREFILL, DECODE = "p", "d"


def runs_of(steps: Iterable[StepRecord], is_shown: Callable[[str], bool] | None = None) -> list[list[Any]]:
    """The runs of requests over these steps, in the order of their beginning.

    A run: the id of its request, first and last step, `p` for prefill chunks or `d` for decodes, tokens, drafted
    tokens, the tokens that were computed before it, and the numbers of its new blocks. Readers with `is_shown` get
    the runs of the requests that they may see, without blocks.
    """
    collector = _Collector(is_shown)
    for record in steps:
        collector.add(record.stats.step, RowColumns.of(record.rows))
    collector.close()
    return collector.runs


class _Collector:
    """The runs up to a step. Most rows go on with a decode, and cost operations of sets alone."""

    def __init__(self, is_shown: Callable[[str], bool] | None) -> None:
        self.runs: list[list[Any]] = []
        self._is_shown = is_shown
        self._decodes: dict[str, list[Any]] = {}  # open runs, by request
        self._prefills: dict[str, list[Any]] = {}
        self._last_step = 0
        self._decoding_ids: Sequence[str] | None = None  # the rows of the last step, if it had decodes alone

    def add(self, step: int, rows: RowColumns) -> None:
        """Takes the rows of the next step."""
        if step != self._last_step + 1:
            self.close()
        self._last_step = step
        chunks = _chunks(rows)
        if chunks or rows.request_ids is not self._decoding_ids:
            self._take_rows(chunks, step, rows)
        self._decoding_ids = None if chunks else rows.request_ids
        self._add_drafts(rows)
        if self._is_shown is None:
            self._add_blocks(rows)

    def _take_rows(self, chunks: list[int], step: int, rows: RowColumns) -> None:
        """Ends and begins runs, where the rows are others than before."""
        decoding = set(rows.request_ids).difference([rows.request_ids[index] for index in chunks])
        if self._is_shown is not None:
            decoding = set(filter(self._is_shown, decoding))
        self._close_decodes(self._decodes.keys() - decoding, step - 1)
        self._open_decodes(decoding - self._decodes.keys(), step, rows)
        self._add_chunks(chunks, step, rows)

    def close(self) -> None:
        """Ends all runs: the next step follows none."""
        self._close_decodes(set(self._decodes), self._last_step)
        self._prefills = {}
        self._decoding_ids = None

    def _close_decodes(self, request_ids: set[str], last_step: int) -> None:
        for request_id in request_ids:
            run = self._decodes.pop(request_id)
            run[2] = last_step
            run[4] += last_step - run[1] + 1  # a token per step, beside drafts

    def _open_decodes(self, request_ids: set[str], step: int, rows: RowColumns) -> None:
        if not request_ids:
            return
        for index, request_id in enumerate(rows.request_ids):
            if request_id in request_ids:
                self._decodes[request_id] = self._begin(request_id, step, DECODE, rows.num_computed_tokens[index])

    def _begin(self, request_id: str, step: int, kind: str, num_computed: int) -> list[Any]:
        run = [request_id, step, step, kind, 0, 0, num_computed, []]
        self.runs.append(run)
        return run

    def _add_chunks(self, chunks: list[int], step: int, rows: RowColumns) -> None:
        going_on, self._prefills = self._prefills, {}
        for index in chunks:
            request_id = rows.request_ids[index]
            if self._is_shown is not None and not self._is_shown(request_id):
                continue
            run = going_on.get(request_id) or self._begin(request_id, step, PREFILL, rows.num_computed_tokens[index])
            run[2] = step
            run[4] += rows.num_scheduled_tokens[index]
            run[5] += len(rows.draft_token_ids.get(index, ()))
            self._prefills[request_id] = run

    def _add_drafts(self, rows: RowColumns) -> None:
        for index, drafts in rows.draft_token_ids.items():
            if run := self._decodes.get(rows.request_ids[index]):
                run[4] += rows.num_scheduled_tokens[index] - 1
                run[5] += len(drafts)

    def _add_blocks(self, rows: RowColumns) -> None:
        for index, block_ids in rows.new_block_ids.items():
            request_id = rows.request_ids[index]
            run = self._decodes.get(request_id) or self._prefills[request_id]
            run[7] += block_ids


def _chunks(rows: RowColumns) -> list[int]:
    """The indexes of rows that compute a part of a prompt."""
    counts, drafts = rows.num_scheduled_tokens, rows.draft_token_ids
    if counts.count(1) == len(counts):
        return []
    return [index for index, num_tokens in enumerate(counts) if num_tokens - len(drafts.get(index, ())) > 1]
