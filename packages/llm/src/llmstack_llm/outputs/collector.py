"""Buffer of outputs between the output loop and one consumer."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest, notify
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_types import RequestOutputKind


class OutputOfRequest(Protocol):
    """An output of one request."""

    request_id: str
    finished: bool


Output = TypeVar("Output", bound=OutputOfRequest)


class OutputCollector(Generic[Output]):
    """Outputs that a consumer has not taken yet; bounded by the size of the requests themselves.

    One producer, one consumer, one event loop (or none, with `get_nowait` alone).

    Attributes:
        take: If there is one, it gets each output while the consumer waits, and the consumer gets what it refuses. The
            last output of a request is always the consumer's. A turn of the consumer's task costs more than most
            consumers do with an output.
        is_split: Whether each token is an output of its own, and outputs that wait are not merged.
    """

    def __init__(self, merge: Callable[[Output, Output], Output] | None = None, *, is_split: bool = False) -> None:
        """`merge`: One output for two of a request, the older one first; without it the newer one, which has all."""
        self.is_split = is_split
        self._merge = merge or _newer
        self._numbers = itertools.count()
        self._id_to_output: dict[str, Output] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.take: Callable[[Output], bool] | None = None
        self._is_due = False

    def put(self, output: Output) -> None:
        """Adds an output, merged with the one of the same request that waits."""
        key = f"{output.request_id} {next(self._numbers)}" if self.is_split else output.request_id
        waiting, waiter = self._id_to_output.get(key), self._waiter
        self._id_to_output[key] = output if waiting is None else self._merge(waiting, output)
        if waiter is None or waiter.done():
            return
        if self.take is None:
            waiter.set_result(None)
        elif not self._is_due:
            self._is_due = True
            waiter.get_loop().call_soon(self.hand_over)  # after all steps that have come

    def hand_over(self) -> None:
        """Offers what has come to `take`, in order, unless the consumer does not wait any more."""
        self._is_due = False
        waiter, take, outputs = self._waiter, self.take, self._id_to_output
        if waiter is None or waiter.done() or take is None:
            return
        while outputs:
            request_id, output = next(iter(outputs.items()))
            try:
                if output.finished or not take(output):
                    waiter.set_result(None)
                    return
            except Exception as error:  # noqa: BLE001 (the consumer raises it)
                del outputs[request_id]
                self.put_error(error)
                return
            del outputs[request_id]

    def put_error(self, error: Exception) -> None:
        """Ends the stream with an error; outputs that wait are still returned first."""
        self._error = self._error or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def get_nowait(self) -> Output | None:
        """The output that waits longest, or None.

        Raises:
            Exception: The error that ended the stream, once no output waits.
        """
        for request_id in self._id_to_output:
            return self._id_to_output.pop(request_id)
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> Output:
        """Waits for the next output.

        Raises:
            Exception: The error that ended the stream.
        """
        while not self._id_to_output and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        for request_id in self._id_to_output:
            return self._id_to_output.pop(request_id)
        raise self._error or RuntimeError("no output and no error")


def _newer(old: Output, new: Output) -> Output:
    return new


def merged(old: RequestOutput, new: RequestOutput, *, is_delta: bool = True) -> RequestOutput:
    """One output out of two successive ones of a request; changes `new`."""
    by_index = {completion.index: completion for completion in old.outputs}
    for completion in new.outputs:
        before = by_index.get(completion.index)
        by_index[completion.index] = completion
        if is_delta and before is not None:
            completion.text = before.text + completion.text
            completion.token_ids = before.token_ids + completion.token_ids
            if before.logprobs is not None:
                completion.logprobs = before.logprobs + (completion.logprobs or [])
    new.outputs = [by_index[index] for index in sorted(by_index)]
    if new.prompt_logprobs is None:
        new.prompt_logprobs = old.prompt_logprobs
    return new


class RequestOutputCollector(OutputCollector[RequestOutput]):
    """Collector of requests with completions."""

    def __init__(self, output_kind: RequestOutputKind, *, is_split: bool = False) -> None:
        is_delta = output_kind is RequestOutputKind.DELTA
        super().__init__(merged if is_delta else functools.partial(merged, is_delta=False), is_split=is_split)

    def close(self, request_ids: Sequence[str]) -> None:
        """The consumer has left these requests."""


class ObservedCollector(RequestOutputCollector):
    """Collector that reports outputs and ends to observers."""

    def __init__(
        self, output_kind: RequestOutputKind, observers: Sequence[RequestObserver], *, is_split: bool = False
    ) -> None:
        super().__init__(output_kind, is_split=is_split)
        self._observers = observers
        self._open_ids: dict[str, None] = {}

    def open(self, request: SubmittedRequest) -> None:
        """Reports a request, whose outputs follow."""
        self._open_ids[request.request_id] = None
        notify(self._observers, RequestObserver.on_submitted, request)

    def put(self, output: RequestOutput) -> None:
        """Reports the output before it is merged."""
        notify(self._observers, RequestObserver.on_output, output)
        if output.finished:
            self._finish(output.request_id, None)
        super().put(output)

    def put_error(self, error: Exception) -> None:
        """Reports the error for every request that has not ended."""
        for request_id in list(self._open_ids):
            self._finish(request_id, error)
        super().put_error(error)

    def close(self, request_ids: Sequence[str]) -> None:
        """Reports the end of requests that the consumer has left."""
        for request_id in request_ids:
            self._finish(request_id, None)

    def _finish(self, request_id: str, error: Exception | None) -> None:
        if request_id in self._open_ids:
            del self._open_ids[request_id]
            notify(self._observers, RequestObserver.on_finished, request_id, error)
