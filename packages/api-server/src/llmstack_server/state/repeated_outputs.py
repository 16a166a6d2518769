"""Outputs of a kept request, which a second run has cut into the same pieces."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from llmstack_llm import GenerationRequest, RequestOutput
from llmstack_llm.outputs.collector import merged
from llmstack_server.state.answer_source import AnswerSource, Cut, OtherTextError, Piece
from llmstack_server.state.server_state import OutputStream

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM


class RepeatedOutputs:
    """Notes the outputs of a request in the source of its answer; those that are there already are repeated first.

    The outputs of a second run have one token each, so that they can be put together in any way.
    """

    def __init__(self, outputs: OutputStream, source: AnswerSource) -> None:
        self.prompts = outputs.prompts
        self._outputs = outputs
        self._source = source
        self._arrived: dict[tuple[int, int], deque[RequestOutput]] = {}
        self._take: Callable[[RequestOutput], bool] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            OtherTextError: It is not as in the first run.
        """
        if self._source.is_repeating:
            try:
                return await self._repeat(self._source.next_cut())
            except OtherTextError:
                self._source.is_other = True
                raise
        if self._arrived:  # more than the first run had
            output = functools.reduce(merged, self._arrived.pop(next(iter(self._arrived))))
        else:
            if self._take is not None:
                self._outputs.follow(self._take)
                self._take = None
            output = await self._outputs.__anext__()
        self._source.note(output)
        return output

    def follow(self, take: Callable[[RequestOutput], bool]) -> None:
        """Lets `take` have outputs without a turn of the iterator's task, once there is nothing to repeat."""
        note = self._source.note

        def take_and_note(output: RequestOutput) -> bool:
            is_taken = take(output)
            if is_taken:
                note(output)
            return is_taken

        self._take = take_and_note

    def fail_after(self, timeout_s: float, error: Exception) -> None:
        """Limits the time of the request."""
        self._outputs.fail_after(timeout_s, error)

    async def aclose(self) -> None:
        """Aborts what has not ended."""
        await self._outputs.aclose()

    async def __aenter__(self) -> Self:
        await self._outputs.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._outputs.__aexit__(*exc_info)

    async def _repeat(self, cut: Cut) -> RequestOutput:
        arrived: list[RequestOutput] = []
        for piece in cut.pieces:
            arrived += await self._next_of((cut.prompt_index, piece.completion), piece)
        if not arrived:
            raise OtherTextError
        return functools.reduce(merged, arrived)

    async def _next_of(self, place: tuple[int, int], piece: Piece) -> list[RequestOutput]:
        """What has the tokens of a piece, once it has come."""
        found: list[RequestOutput] = []
        token_ids: list[int] = []
        is_last = False
        while len(token_ids) < len(piece.token_ids) or (piece.is_last and not is_last):
            while place not in self._arrived:
                await self._receive()
            queue = self._arrived[place]
            found.append(queue.popleft())
            if not queue:
                del self._arrived[place]
            (completion,) = found[-1].outputs
            token_ids += completion.token_ids
            is_last = completion.finish_reason is not None
        if tuple(token_ids) != piece.token_ids or is_last != piece.is_last:
            raise OtherTextError
        return found

    async def _receive(self) -> None:
        try:
            output = await self._outputs.__anext__()
        except StopAsyncIteration:
            raise OtherTextError from None
        for one in output.outputs:
            place = output.prompt_index, one.index
            self._arrived.setdefault(place, deque()).append(replace(output, outputs=[one]))


async def submit_kept(engine: AsyncLLM, source: AnswerSource, *requests: GenerationRequest) -> OutputStream:
    """Submits the prompts of a kept request; raises as `AsyncLLM.submit`."""
    is_split = source.is_repeating
    return RepeatedOutputs(await engine.submit(*[replace(one, is_split=is_split) for one in requests]), source)
