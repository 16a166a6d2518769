"""The stream of outputs that `AsyncLLM.submit` returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.requests import AdmittedRequest


class GenerationStream(AsyncIterator[RequestOutput], AbstractAsyncContextManager["GenerationStream"]):
    """Outputs of the prompts that were submitted together; an asynchronous iterator and context manager.

    Closing it aborts what has not ended, so close it whenever the iteration may be left.

    Attributes:
        prompts: The prompts after every check, in the order of submission.
    """

    def __init__(
        self,
        prompts: Sequence[AdmittedRequest],
        request_ids: Sequence[str],
        collector: RequestOutputCollector,
        abort: Callable[[Sequence[str]], None],
    ) -> None:
        """`abort` ends requests, without an output of their own, and ignores those that have ended."""
        self.prompts = prompts
        self._request_ids = request_ids
        self._collector = collector
        self._abort = abort
        self._num_unfinished = len(prompts)
        self._deadline: asyncio.TimerHandle | None = None

    def fail_after(self, timeout_s: float, error: Exception) -> None:
        """Aborts the requests and raises `error` in the iteration unless all have ended by then."""
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._fail, error)

    def follow(self, take: Callable[[RequestOutput], bool]) -> None:
        """Hands each output to `take` while the iterator waits for one, without a turn of its task.

        What `take` refuses, by False, comes from the iterator, and so does the last output of each request.
        """
        self._collector.take = take

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            EngineDeadError: The engine core is gone.
            RequestFailedError: A request failed inside the engine.
        """
        if not self._num_unfinished:
            raise StopAsyncIteration
        output = await self._collector.get()
        if output.finished:
            self._num_unfinished -= 1
        return output

    async def aclose(self, *exc_info: object) -> None:
        """Aborts what has not ended. Idempotent; also the end of a `with` block, whose error it does not need."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._num_unfinished:
            self._num_unfinished = 0
            self._abort(self._request_ids)
            self._collector.close(self._request_ids)

    __aexit__ = aclose

    def _fail(self, error: Exception) -> None:
        if self._num_unfinished:
            self._abort(self._request_ids)
            self._collector.put_error(error)
