"""What lies between the output loop and one consumer: at most one output, merged while nobody takes it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from llmstack_llm.outputs import CompletionOutput, RequestOutput
from llmstack_types import RequestOutputKind

Output = TypeVar("Output")


class OutputCollector(Generic[Output]):
    """Holds what one request has brought and its consumer has not taken; the size is bounded by the request's own.

    One producer, one consumer, one event loop (or none, with `get_nowait` alone).
    """

    def __init__(self) -> None:
        self._output: Output | None = None
        self._error: Exception | None = None
        self._has_something = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds an output to what waits."""
        self._output = output if self._output is None else self._merge(self._output, output)
        self._has_something.set()

    def put_error(self, error: Exception) -> None:
        """Ends the stream; what waits is still delivered first."""
        self._error = self._error or error
        self._has_something.set()

    def get_nowait(self) -> Output | None:
        """What waits, or None.

        Raises:
            Exception: The error that ended the stream, once nothing else waits.
        """
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        if self._error is None:
            self._has_something.clear()
        return output

    async def get(self) -> Output:
        """Waits for the next output.

        Raises:
            Exception: The error that ended the stream.
        """
        while (output := self.get_nowait()) is None:
            await self._has_something.wait()
        return output

    def _merge(self, old: Output, new: Output) -> Output:
        """What holds both; here the newer one, which says all."""
        return new


class RequestOutputCollector(OutputCollector[RequestOutput]):
    """The collector of a request with completions."""

    def __init__(self, output_kind: RequestOutputKind) -> None:
        super().__init__()
        self._is_delta = output_kind is RequestOutputKind.DELTA

    def _merge(self, old: RequestOutput, new: RequestOutput) -> RequestOutput:
        return _merged(old, new, self._is_delta)


def _merged(old: RequestOutput, new: RequestOutput, is_delta: bool) -> RequestOutput:
    by_index = {completion.index: completion for completion in old.outputs}
    for completion in new.outputs:
        before = by_index.get(completion.index)
        by_index[completion.index] = _joined(before, completion) if is_delta and before else completion
    new.outputs = [by_index[index] for index in sorted(by_index)]
    if new.prompt_logprobs is None:
        new.prompt_logprobs = old.prompt_logprobs
    return new


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    new.text = old.text + new.text
    new.token_ids = old.token_ids + new.token_ids
    if old.logprobs is not None:
        new.logprobs = old.logprobs + (new.logprobs or [])
    return new
