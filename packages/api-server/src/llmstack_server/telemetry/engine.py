"""An engine front end that notes what each request makes it do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from llmstack_server.protocols import AdmittedInput, AdmittedPrompt, EngineClient, PooledOutput, PromptOutput
from llmstack_server.telemetry.request_trace import PromptTrace, RequestTrace, current_trace
from llmstack_types import SamplingParams

OnPrompt = Callable[[RequestTrace, PromptTrace], None]


def observed_engine(engine: EngineClient, on_prompt: OnPrompt = lambda _, __: None) -> EngineClient:
    """`engine`, noting what passes through; `on_prompt` hears of each prompt that is handed to it."""
    # The protocol's other methods are forwarded by name, which types do not show.
    return cast("EngineClient", ObservedEngine(engine, on_prompt))


class ObservedEngine:
    """An `EngineClient` over another; every API passes here. Requests outside of a `RequestTrace` are not noted."""

    def __init__(self, engine: EngineClient, on_prompt: OnPrompt) -> None:
        self._engine = engine
        self._on_prompt = on_prompt

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt: AdmittedPrompt, sampling_params: SamplingParams | None, request_id: str, **options: Any
    ) -> AsyncIterator[PromptOutput]:
        """As the engine's."""
        noted = self._begin(request_id, len(prompt.prompt_token_ids), prompt.sampling_params)
        stream = self._engine.generate(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                noted.timings = output.metrics
                noted.finish_reasons += [new.finish_reason for new in output.outputs if new.finish_reason is not None]
                yield output
        finally:
            noted.end_s = time.monotonic()
            await _close(stream)

    async def encode(
        self, prompt: AdmittedInput, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[PooledOutput]:
        """As the engine's."""
        noted = self._begin(request_id, len(prompt.prompt_token_ids), None)
        stream = self._engine.encode(prompt, pooling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            noted.end_s = time.monotonic()
            await _close(stream)

    def _begin(self, request_id: str, num_prompt_tokens: int, params: SamplingParams | None) -> PromptTrace:
        prompt, trace = PromptTrace(request_id, num_prompt_tokens, time.monotonic(), params), current_trace.get()
        if trace is not None:
            self._on_prompt(trace, trace.begin_prompt(prompt))
        return prompt


async def _close(stream: object) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
