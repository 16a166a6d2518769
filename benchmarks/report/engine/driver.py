"""Plays the scheduler for a batch of equal rows, as plainly as can be, so that steps are the runner's time alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Protocol

from llmstack_types import (
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)


class Pending(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Waits for it."""


class Runner(Protocol):
    """What of a model runner is driven."""

    def execute_model(self, scheduled: SchedulerOutput) -> Pending:
        """Starts a step."""


class Decoder:
    """A batch that decodes, row i in blocks of its own that lie one after the other.

    One row's prompt is computed; the others get copies of its blocks, so their keys are as real and lie elsewhere.
    """

    def __init__(
        self, runner: Runner, block_size: int, *, batch: int, context: int, num_steps: int, params: SamplingParams
    ) -> None:
        """Rows of `context` tokens that will decode at most `num_steps`."""
        self._runner = runner
        self._block_size = block_size
        self._context = context
        self._blocks_per_row = -(-(context + num_steps + 1) // block_size)
        self._params = params
        self._ids = [f"row-{index}" for index in range(batch)]
        self._num_computed = context - 1
        self._num_steps = 0

    @staticmethod
    def num_tokens(batch: int, context: int, num_steps: int, block_size: int) -> int:
        """Room that such a batch takes in KV storage."""
        return batch * -(-(context + num_steps + 1) // block_size) * block_size

    def fill(self, max_num_batched_tokens: int) -> None:
        """Computes the prompt of the first row in chunks, copies it to all others, and makes their first step."""
        tokens = [(7 * index) % 251 for index in range(self._context)]
        new = [NewRequest(self._ids[0], list(tokens), self._context, self._params)]
        end = self._context - 1
        for start in range(0, end, max_num_batched_tokens):
            num_tokens = min(max_num_batched_tokens, end - start)
            blocks = self._table(0, end) if start == 0 else []
            self._execute(new, [ScheduledRequest(self._ids[0], start, num_tokens, blocks)]).result()
            new = []
        others = range(1, len(self._ids))
        copies = [
            (block, row * self._blocks_per_row + block)
            for row in others
            for block in range(-(-end // self._block_size))
        ]
        new = [NewRequest(self._ids[row], list(tokens), self._context, self._params) for row in others]
        rows = [ScheduledRequest(self._ids[0], end, 1, self._grown(0))]
        rows += [ScheduledRequest(self._ids[row], end, 1, self._table(row, end + 1)) for row in others]
        self._execute(new, rows, copies).result()
        self._num_computed = self._context

    def steps(self, num_steps: int, *, is_ahead: bool) -> list[float]:
        """Seconds between the results of steps that follow each other, the first left out; at least three steps.

        `is_ahead`: each step is started before the one before it has been waited for.
        """
        under_way: Pending | None = None
        times = [time.perf_counter()]
        for _ in range(num_steps):
            pending = self._decode()
            if not is_ahead:
                pending.result()
                times.append(time.perf_counter())
                continue
            if under_way is not None:
                under_way.result()
                times.append(time.perf_counter())
            under_way = pending
        if under_way is not None:
            under_way.result()
        seconds = [later - earlier for earlier, later in pairwise(times)]
        return seconds[1:]  # the first one starts a step more than it waits for

    def end(self) -> None:
        """Removes the rows."""
        step = SchedulerOutput(step=self._num_steps, removed_request_ids=self._ids)
        self._runner.execute_model(step).result()

    def _decode(self) -> Pending:
        computed = self._num_computed
        is_new_block = computed % self._block_size == 0
        rows = [
            ScheduledRequest(name, computed, 1, self._grown(row) if is_new_block else [])
            for row, name in enumerate(self._ids)
        ]
        self._num_computed += 1
        return self._execute([], rows)

    def _table(self, row: int, num_tokens: int) -> list[int]:
        start = row * self._blocks_per_row
        return list(range(start, start + -(-num_tokens // self._block_size)))

    def _grown(self, row: int) -> list[int]:
        """The block of the next token, if it is the block's first."""
        index, place = divmod(self._num_computed, self._block_size)
        return [row * self._blocks_per_row + index] if place == 0 else []

    def _execute(
        self, new: list[NewRequest], rows: list[ScheduledRequest], copies: list[tuple[int, int]] | None = None
    ) -> Pending:
        self._num_steps += 1
        return self._runner.execute_model(
            SchedulerOutput(
                step=self._num_steps,
                new_requests=new,
                scheduled_requests=rows,
                total_num_scheduled_tokens=sum(row.num_scheduled_tokens for row in rows),
                block_copies=copies or [],
            )
        )


class DraftDecoder(Decoder):
    """A batch whose rows all have drafts in each step, which are verified before the next one begins."""

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        *,
        batch: int,
        context: int,
        num_steps: int,
        params: SamplingParams,
        num_drafts: int,
    ) -> None:
        """As `Decoder`; `num_drafts` guesses of each row in a step, of which any may be right."""
        room = num_steps * (1 + num_drafts)
        super().__init__(runner, block_size, batch=batch, context=context, num_steps=room, params=params)
        self._drafts = [(11 * index) % 251 for index in range(num_drafts)]
        self._num_added = [0] * batch  # tokens of each row since it was filled

    def steps(self, num_steps: int, *, is_ahead: bool = False) -> list[float]:
        """Seconds of each step, the first left out; no step is started before the one before it is known."""
        times = [time.perf_counter()]
        for _ in range(num_steps):
            rows = [
                ScheduledRequest(name, self._num_computed + added, 1 + len(self._drafts), [], self._drafts)
                for name, added in zip(self._ids, self._num_added, strict=True)
            ]
            output = self._execute([], rows).result()
            times.append(time.perf_counter())
            for row, token_ids in enumerate(output.sampled_token_ids):
                self._num_added[row] += len(token_ids)
        return [later - earlier for earlier, later in pairwise(times)][1:]

    def _table(self, row: int, num_tokens: int) -> list[int]:
        """All blocks that the row will have."""
        return super()._table(row, self._blocks_per_row * self._block_size)

    def _grown(self, row: int) -> list[int]:
        return []


@contextmanager
def decoding(decoder: Decoder, max_num_batched_tokens: int) -> Iterator[Decoder]:
    """The batch filled, and removed afterwards, also from a runner that has failed as far as it allows."""
    try:
        decoder.fill(max_num_batched_tokens)
        yield decoder
    except BaseException:
        with suppress(Exception):  # the first failure is the one to report
            decoder.end()
        raise
    decoder.end()


def prefill_times(runner: Runner, block_size: int, num_tokens: int, num_times: int) -> Iterator[float]:
    """Seconds of whole prompts in one step each."""
    blocks = list(range(-(-num_tokens // block_size)))
    for index in range(num_times):
        name, tokens = f"prompt-{index}", [(7 * place + index) % 251 for place in range(num_tokens)]
        request = NewRequest(name, tokens, num_tokens, SamplingParams(temperature=0.0, max_tokens=1))
        start_s = time.perf_counter()
        row = ScheduledRequest(name, 0, num_tokens, blocks)
        runner.execute_model(SchedulerOutput(index, [request], [row], [], num_tokens)).result()
        yield time.perf_counter() - start_s
        runner.execute_model(SchedulerOutput(index, removed_request_ids=[name])).result()
