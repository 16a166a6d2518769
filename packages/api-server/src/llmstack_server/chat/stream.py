"""Base of the answers of all chat APIs: outputs of the engine as deltas of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm import CompletionOutput, RequestOutput
from llmstack_server.chat.deltas import ChatDelta, ChatMessage, fold
from llmstack_server.chat.logprobs import Position
from llmstack_server.chat.reading import ChoiceParser, ReadingPlan
from llmstack_server.state.server_state import OutputStream
from llmstack_server.web.usage import UsageCounter


class ChatStream:
    """The answer to one submitted conversation. Iterate over `outputs` and `read` each, or call `fold`, once.

    Attributes:
        outputs: The engine's outputs; `outputs.prompts[0]` is the rendered conversation with its parameters.
        usage: Tokens counted so far.
        prompt_logprobs: Set with the first delta, where requested.
    """

    def __init__(self, outputs: OutputStream, plan: ReadingPlan | None = None) -> None:
        """`plan`: None where all text is content."""
        self.outputs = outputs
        self.usage = UsageCounter(outputs.prompts)
        self.prompt_logprobs: Sequence[Position | None] | None = None
        self._plan = plan
        self._index_to_parser: dict[int, ChoiceParser] = {}
        if plan is not None and plan.reasoning is not None:
            self.usage.num_reasoning_tokens = 0

    def read(self, output: RequestOutput) -> list[ChatDelta]:
        """New text, reasoning and calls in one output, choice by choice.

        With the output kind `FINAL_ONLY` there is one delta per choice.
        """
        self.usage.add(output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        plan = self._plan
        if plan is not None:
            return [self._parse(new, plan) for new in output.outputs]
        return [
            ChatDelta(new.index, new.text, "", (), new.token_ids, new.logprobs, new.finish_reason, new.stop_reason)
            for new in output.outputs
        ]

    async def fold(self) -> list[ChatMessage]:
        """The whole answer, one message per choice.

        Raises:
            RequestFailedError, EngineDeadError: The engine failed.
        """
        async with self.outputs as outputs:
            return fold([delta async for output in outputs for delta in self.read(output)])

    def _parse(self, new: CompletionOutput, plan: ReadingPlan) -> ChatDelta:
        parser = self._index_to_parser.get(new.index)
        if parser is None:
            parser = self._index_to_parser[new.index] = ChoiceParser(plan)
        num_before = parser.num_reasoning_tokens
        delta = parser.read(new)
        if self.usage.num_reasoning_tokens is not None:
            self.usage.num_reasoning_tokens += parser.num_reasoning_tokens - num_before
        return delta
