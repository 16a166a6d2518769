"""`--enable-log-requests`: one line when a request reaches the engine, one when it has ended."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from llmstack_server.http.request_id import current_request_id
from llmstack_server.http_options import RequestLogConfig
from llmstack_server.protocols import AdmittedInput, AdmittedPrompt, EngineClient, PooledOutput, PromptOutput
from llmstack_types import PoolingParams, SamplingParams

logger = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()


def logged_engine(engine: EngineClient, config: RequestLogConfig) -> EngineClient:
    """`engine`, or what logs its requests where that is asked for."""
    if not config.logs_requests:
        return engine
    # The protocol's other methods are forwarded by name, which types do not show.
    return cast("EngineClient", LoggedEngine(engine, config))


class LoggedEngine:
    """An `EngineClient` that logs what is generated through another; every API passes here."""

    def __init__(
        self, engine: EngineClient, config: RequestLogConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt: AdmittedPrompt, sampling_params: SamplingParams | None, request_id: str, **options: Any
    ) -> AsyncIterator[PromptOutput]:
        """As the engine's, with a line before and one after it, however it ends."""
        began_s = self._clock()
        outcome = _Outcome(self._config)
        logger.info(
            "request %s (%s): prompt %s, %d tokens, %s",
            request_id, current_request_id.get(), self._shown_prompt(prompt), len(prompt.prompt_token_ids),
            _shown_params(prompt.sampling_params),
        )  # fmt: skip
        stream = self._engine.generate(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                outcome.note(output)
                yield output
        except Exception as error:  # noted whatever it is, and raised again
            outcome.error = type(error).__name__
            raise
        finally:
            await _close(stream)
            logger.info("request %s: %s after %.3f s", request_id, outcome.shown(), self._clock() - began_s)

    async def encode(
        self, prompt: AdmittedInput, pooling_params: PoolingParams | None, request_id: str, **options: Any
    ) -> AsyncIterator[PooledOutput]:
        """As the engine's, with the same two lines; what is pooled is not shown."""
        began_s, outcome = self._clock(), "abort"
        num_tokens = len(prompt.prompt_token_ids)
        logger.info("request %s (%s): %d tokens to pool", request_id, current_request_id.get(), num_tokens)
        stream = self._engine.encode(prompt, pooling_params, request_id, **options)
        try:
            async for output in stream:
                outcome = "pooled"
                yield output
        except Exception as error:  # noted whatever it is, and raised again
            outcome = type(error).__name__
            raise
        finally:
            await _close(stream)
            logger.info("request %s: %s after %.3f s", request_id, outcome, self._clock() - began_s)

    def _shown_prompt(self, prompt: AdmittedPrompt) -> str:
        if prompt.prompt is not None:
            return shortened(prompt.prompt, self._config.max_chars)
        limit = self._config.max_chars
        token_ids = prompt.prompt_token_ids if limit is None else prompt.prompt_token_ids[:limit]
        return f"{list(token_ids)}{'...' if len(token_ids) < len(prompt.prompt_token_ids) else ''}"


class _Outcome:
    """What a request has brought so far."""

    def __init__(self, config: RequestLogConfig) -> None:
        self._config = config
        self._num_tokens = 0
        self._index_to_reason: dict[int, str] = {}
        self._index_to_text: dict[int, str] = {}
        self.error: str | None = None

    def note(self, output: PromptOutput) -> None:
        """Takes over one output; kept texts are bounded by what will be shown of them."""
        for new in output.outputs:
            self._num_tokens += len(new.token_ids)
            if new.finish_reason is not None:
                self._index_to_reason[new.index] = new.finish_reason
            if self._config.logs_outputs:
                text = self._index_to_text.get(new.index, "")
                if self._config.max_chars is None or len(text) <= self._config.max_chars:
                    self._index_to_text[new.index] = text + new.text

    def shown(self) -> str:
        """Finish reasons or the error, tokens, and the texts where asked for."""
        reasons = ", ".join(self._index_to_reason[index] for index in sorted(self._index_to_reason))
        how = self.error or reasons or "abort"
        texts = [shortened(self._index_to_text[index], self._config.max_chars) for index in sorted(self._index_to_text)]
        return " ".join([f"{how}, {self._num_tokens} tokens", *texts])


def shortened(text: str, max_chars: int | None) -> str:
    """The beginning of a text on one line, quoted, so that no text can forge a line of the log."""
    if max_chars is None or len(text) <= max_chars:
        return repr(text)
    return f"{text[:max_chars]!r}..."


def _shown_params(params: SamplingParams) -> str:
    """The parameters that are not their defaults."""
    shown = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(_DEFAULTS, field.name)
    }
    return repr({name: str(value) if name == "output_kind" else value for name, value in shown.items()})


async def _close(stream: object) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
