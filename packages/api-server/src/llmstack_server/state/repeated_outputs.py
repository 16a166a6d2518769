"""Outputs of a kept request, with the same cuts in each run."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from llmstack_llm import GenerationRequest, RequestOutput
from llmstack_llm.outputs.collector import merged
from llmstack_server.state.answer_source import AnswerSource, Cut, OtherTextError, Piece
from llmstack_server.state.server_state import OutputStream
from llmstack_types import EngineReady

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM


class OutputsThrough:
    """The outputs of a request as they are; a subclass notes something of them."""

    def __init__(self, outputs: OutputStream) -> None:
        self.prompts = outputs.prompts
        self._outputs = outputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self._outputs.__anext__()

    def follow(self, take: Callable[[RequestOutput], bool]) -> None:
        """Lets `take` have outputs without a turn of the iterator's task."""
        self._outputs.follow(take)

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


class RepeatedOutputs(OutputsThrough):
    """Notes the outputs of a request in the source of its answer, after a repetition of those that are there already.

    The outputs of a second run have one token each, so that they can be put together in any way. What the first run has
    found in the prefix cache is what later ones say, too: it is part of events that a reader may have.

    Attributes:
        source: The source of the answer.
        engines: By prompt, the engine cores that have computed it; see `RequestOutput.engines`.
    """

    def __init__(self, outputs: OutputStream, source: AnswerSource) -> None:
        super().__init__(outputs)
        self.source = source
        if [prompt.sampling_params.n for prompt in outputs.prompts] != [1]:
            source.is_repeatable = source.follows = False
        self.engines: dict[int, Sequence[EngineReady]] = {}
        self._arrived: dict[tuple[int, int], deque[RequestOutput]] = {}
        self._take: Callable[[RequestOutput], bool] | None = None
        self._prompt_index_to_num_cached: dict[int, int] = {}

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            OtherTextError: It is not as in the first run.
        """
        if self.source.is_repeating:
            try:
                return await self._repeat(self.source.next_cut())
            except OtherTextError:
                self.source.is_other = True
                raise
        if self._arrived:  # more than the first run had
            place, queue = next(iter(self._arrived.items()))
            output = self._as_begun(queue.popleft())
            if not queue:
                del self._arrived[place]
        else:
            if self._take is not None:
                self._outputs.follow(self._take)
                self._take = None
            output = self._as_begun(await self._outputs.__anext__())
        self.engines[output.prompt_index] = output.engines
        self.source.note(output)
        return output

    def follow(self, take: Callable[[RequestOutput], bool]) -> None:
        """Follows the outputs as `OutputsThrough.follow`, once there is nothing to repeat."""
        source, engines, num_cached = self.source, self.engines, self._prompt_index_to_num_cached

        def take_and_note(output: RequestOutput) -> bool:
            if output.num_cached_tokens != num_cached.get(output.prompt_index):
                output = self._as_begun(output)
            size = source.note(output)
            if not take(output):
                source.take_back(size)
                return False
            engines[output.prompt_index] = output.engines
            return True

        self._take = take_and_note

    async def _repeat(self, cut: Cut) -> RequestOutput:
        arrived: list[RequestOutput] = []
        for piece in cut.pieces:
            arrived += await self._next_of((cut.prompt_index, piece.completion), piece)
        if not arrived:
            raise OtherTextError
        output = self._as_begun(functools.reduce(merged, arrived))
        self.engines[output.prompt_index] = output.engines
        return output

    def _as_begun(self, output: RequestOutput) -> RequestOutput:
        """The output with the cached tokens of the first run; raises OtherTextError."""
        num_cached = output.num_cached_tokens
        if num_cached is None:
            return output
        known = self._prompt_index_to_num_cached.get(output.prompt_index)
        if known is None:
            known = self._prompt_index_to_num_cached[output.prompt_index] = self.source.lasting(num_cached)
        return output if known == num_cached else replace(output, num_cached_tokens=known)

    async def _next_of(self, place: tuple[int, int], piece: Piece) -> list[RequestOutput]:
        """The outputs with the tokens of a piece, once it has come."""
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
    if source.is_second_run:
        requests = tuple([replace(one, is_split=True) for one in requests])
    return RepeatedOutputs(await engine.submit(*requests), source)
