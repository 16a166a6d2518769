"""A step log that a thread of its own writes, beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any, Final

from llmstack_step_log.encoding import encode_forked
from llmstack_step_log.records import Tag
from llmstack_step_log.sinks import Sink
from llmstack_step_log.snapshots import State
from llmstack_step_log.step_log import StepLog
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, PrefixMedia, SchedulerOutput

# A batch costs the thread of the steps some microseconds, and the writing one 0.8 ms with eight steps of 256 rows.
STEPS_PER_BATCH: Final = 8
SMALL_STEPS_PER_BATCH: Final = 32
MAX_SMALL_ROWS: Final = 8
# The thread lets go of the interpreter after so long: a step whose model is done waits for it.
MAX_HOLD_S: Final = 1e-4
PAUSE_S: Final = 5e-5
# Beyond that the steps wait for the thread, as for a disk that stands still.
MAX_WAITING_BATCHES: Final = 64

Call = tuple[Callable[..., object], *tuple[Any, ...]]


class DeferredLog:
    """Takes down the calls of `StepLog`, and lets a thread make them in the same order while the model computes.

    What it is given must not change afterwards. The model runner goes on with the tokens of new requests, so these are
    copied at once; packing them takes ten times as long. An error of the thread is raised by one of the next calls.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._calls: list[Call] = []
        self._batches: SimpleQueue[list[Call] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._num_steps = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write, name="step-log", daemon=True)
        self._thread.start()

    @property
    def sink(self) -> Sink:
        """The sink of the log."""
        return self._log.sink

    @property
    def snapshot_steps(self) -> int:
        """Steps between two snapshots; 0 if there are none."""
        return self._log.snapshot_steps

    @property
    def num_waiting_batches(self) -> int:
        """Batches that the thread has not begun."""
        return self._batches.qsize()

    def snapshots_from(self, take_state: Callable[[], State]) -> None:
        """Lets snapshots copy the state of the control plane with `take_state`."""
        self._log.snapshots_from(take_state)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Logs a new request."""
        self._calls.append((self._log.add_request, request))

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> None:
        """Logs a fork of a running request."""
        self._calls.append((self._log.put, Tag.FORK, encode_forked(parent_id, child)))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Logs that requests are aborted."""
        self._calls.append((self._log.abort_requests, request_ids))

    def reset_prefix_cache(self) -> None:
        """Logs a reset of the prefix cache."""
        self._calls.append((self._log.reset_prefix_cache,))

    def release_sessions(self, tenant: str, name: str) -> None:
        """Logs that sessions are given up."""
        self._calls.append((self._log.release_sessions, tenant, name))

    def change_numerics(self, numerics: Mapping[str, Any]) -> None:
        """Logs that results depend on other weights from now on."""
        self._calls.append((self._log.change_numerics, numerics))

    def import_prefix(self, token_ids: list[int], salt: str, media: PrefixMedia) -> None:
        """Logs that another engine core's blocks become findable."""
        self._calls.append((self._log.import_prefix, token_ids, salt, media))

    def mark(self) -> None:
        """Marks the moment of a snapshot's state: all calls before it are made first."""
        self.wait()
        self._log.mark()

    def step(self, now_us: int, scheduled: SchedulerOutput) -> None:
        """Logs a call for the next step, and the step. Batches go to the thread now, since the model computes next.

        A checkpoint needs the step after it, and a batch ends with that: no batch withholds a checkpoint.
        """
        if scheduled.new_requests:
            copies = [replace(request, token_ids=request.token_ids.copy()) for request in scheduled.new_requests]
            scheduled = replace(scheduled, new_requests=copies)
        self._calls.append((self._log.step, now_us, scheduled))
        self._num_steps = num_steps = self._num_steps + 1
        if num_steps % STEPS_PER_BATCH == 1:
            is_small = len(scheduled.scheduled_requests) <= MAX_SMALL_ROWS
            if not is_small or num_steps % SMALL_STEPS_PER_BATCH == 1:
                self._hand_over()

    def result(
        self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str],
        outputs: EngineCoreOutputs,
    ) -> None:  # fmt: skip
        """Logs the results of the step `lag` steps before the last one, and its outputs."""
        self._calls.append((self._log.result, now_us, lag, sampled_token_ids, errors, outputs))

    def schedule(self, now_us: int) -> None:
        """Logs a call for the next step, which failed."""
        self._calls.append((self._log.schedule, now_us))

    def update(self, now_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str]) -> None:
        """Logs the results of a step that could not be applied."""
        self._calls.append((self._log.update, now_us, lag, sampled_token_ids, errors))

    def decide(self, packed: bytes) -> None:
        """Adds a decision of the scheduler to the log's hash."""
        self._calls.append((self._log.decide, packed))

    def flush(self) -> None:
        """Lets the thread hand over what is not yet in the sink; for moments when there is nothing else to do."""
        if self._calls:
            self._calls.append((self._log.flush,))
            self._hand_over()

    def wait(self) -> None:
        """Returns when the thread has made all calls.

        Raises:
            Exception: One of them has raised it.
        """
        is_done = threading.Event()
        self._batches.put(self._calls)
        self._batches.put([(is_done.set,)])
        self._calls = []
        is_done.wait()
        self._raise()

    def dump(self) -> bytes:
        """The log up to now, as far as it is kept in memory; empty where a file has it.

        Raises:
            Exception: The thread has failed.
        """
        self._calls.append((self._log.flush,))
        self.wait()
        return self.sink.dump()

    def close(self) -> None:
        """Ends the log in good order. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._batches.put(self._calls)
        self._batches.put(None)
        self._calls = []
        self._thread.join()
        self._log.close()
        self._raise()

    def _hand_over(self) -> None:
        if self.num_waiting_batches >= MAX_WAITING_BATCHES:
            self.wait()
        self._raise()
        self._batches.put(self._calls)
        self._calls = []

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (batch := self._batches.get()) is not None:
            began_s = perf_counter()
            for call, *arguments in batch:
                if perf_counter() - began_s > MAX_HOLD_S:
                    sleep(PAUSE_S)
                    began_s = perf_counter()
                try:
                    call(*arguments)
                except Exception as error:  # noqa: BLE001 (the engine core's thread raises it)
                    self._error = self._error or error
