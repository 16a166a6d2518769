"""The answer to a conversation as it grows, in the terms of no API in particular."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from llmstack_server.chat.deltas import ChatDelta, ChatMessage, fold
from llmstack_server.chat.reading import ChoiceReader, ReadingPlan
from llmstack_server.openai.events import close
from llmstack_server.openai.logprobs import Position
from llmstack_server.openai.usage import UsageCounter
from llmstack_server.protocols import AdmittedPrompt, Completion, EngineClient


class ChatStream:
    """One conversation that has passed every check; nothing runs before `deltas` or `fold` is called, once.

    Attributes:
        prompt: The rendered conversation, with its sampling parameters.
        usage: Tokens counted so far.
        prompt_logprobs: Set with the first delta, where asked for.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompt: AdmittedPrompt,
        request_id: str,
        *,
        reading: ReadingPlan | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """`reading`: None where all that the model says is content."""
        self.prompt = prompt
        self.usage = UsageCounter([prompt])
        self.prompt_logprobs: Sequence[Position | None] | None = None
        self._engine = engine
        self._request_id = request_id
        self._reading = reading
        self._index_to_reader: dict[int, ChoiceReader] = {}
        self._priority = priority
        self._cache_salt = cache_salt
        if reading is not None and reading.reasoning is not None:
            self.usage.num_reasoning_tokens = 0

    @property
    def n(self) -> int:
        """How many choices there will be."""
        return self.prompt.sampling_params.n

    async def deltas(self) -> AsyncGenerator[ChatDelta, None]:
        """What is new, choice by choice; closing it aborts the request.

        With the output kind `FINAL_ONLY` there is one delta per choice.

        Raises:
            ServerOverloadedError, RequestFailedError, EngineDeadError: As `EngineClient.generate`.
        """
        outputs = self._engine.generate(
            self.prompt, None, self._request_id, priority=self._priority, cache_salt=self._cache_salt
        )
        usage, reading = self.usage, self._reading
        try:
            async for output in outputs:
                usage.add(0, output)
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                for new in output.outputs:
                    if reading is not None:
                        yield self._read(new, reading)
                        continue
                    yield ChatDelta(
                        new.index, new.text, "", (), new.token_ids, new.logprobs, new.finish_reason, new.stop_reason
                    )
        finally:
            await close(outputs)

    def _read(self, new: Completion, reading: ReadingPlan) -> ChatDelta:
        reader = self._index_to_reader.get(new.index)
        if reader is None:
            reader = self._index_to_reader[new.index] = ChoiceReader(reading)
        num_before = reader.num_reasoning_tokens
        delta = reader.read(new)
        if self.usage.num_reasoning_tokens is not None:
            self.usage.num_reasoning_tokens += reader.num_reasoning_tokens - num_before
        return delta

    async def fold(self) -> list[ChatMessage]:
        """The whole answer, one message per choice; raises as `deltas`."""
        async with aclosing(self.deltas()) as deltas:
            return fold([delta async for delta in deltas])
