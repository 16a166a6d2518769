"""`--request-timeout`: how long a request may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar, cast

from llmstack_server.http.errors import HTTPError, deadline_exceeded
from llmstack_server.protocols import AdmittedInput, AdmittedPrompt, EngineClient, PooledOutput, PromptOutput
from llmstack_types import PoolingParams, SamplingParams

_Output = TypeVar("_Output")


def timed_engine(engine: EngineClient, timeout_s: float | None) -> EngineClient:
    """`engine`, or what ends its requests in time where that is asked for."""
    if timeout_s is None:
        return engine
    # The protocol's other methods are forwarded by name, which types do not show.
    return cast("EngineClient", TimedEngine(engine, timeout_s))


class TimedEngine:
    """An `EngineClient` that ends what takes too long through another: as if its client had gone away."""

    def __init__(self, engine: EngineClient, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._engine, name)

    def generate(
        self, prompt: AdmittedPrompt, sampling_params: SamplingParams | None, request_id: str, **options: Any
    ) -> AsyncIterator[PromptOutput]:
        """As the engine's; raises HTTPError 504 when the time is over."""
        return self._timed(self._engine.generate(prompt, sampling_params, request_id, **options))

    def encode(
        self, prompt: AdmittedInput, pooling_params: PoolingParams | None, request_id: str, **options: Any
    ) -> AsyncIterator[PooledOutput]:
        """Likewise."""
        return self._timed(self._engine.encode(prompt, pooling_params, request_id, **options))

    async def _timed(self, stream: AsyncIterator[_Output]) -> AsyncIterator[_Output]:
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            while True:
                try:
                    # Not around the `yield`: what the reader does is not ours to interrupt.
                    async with asyncio.timeout_at(end_s):
                        output = await anext(stream)
                except StopAsyncIteration:
                    return
                yield output
        except TimeoutError:
            raise HTTPError(deadline_exceeded(self._timeout_s)) from None
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
