"""`--enable-log-requests`: a line at the submission of a request and at its end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from llmstack_llm import RequestObserver, RequestOutput, SubmittedRequest
from llmstack_server.observability.logs import current_request_id
from llmstack_server.options.http_options import RequestLogConfig
from llmstack_types import SamplingParams

logger = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()


class RequestLog(RequestObserver):
    """Logs each request of any API at its submission and at its end."""

    def __init__(self, config: RequestLogConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._id_to_outcome: dict[str, _Outcome] = {}

    def on_submitted(self, request: SubmittedRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        self._id_to_outcome[request.request_id] = _Outcome(self._config, self._clock())
        if isinstance(request.params, SamplingParams):
            logger.info(
                "request %s (%s): prompt %s, %d tokens, %s",
                request.request_id, current_request_id.get(), self._shown_prompt(request), num_tokens,
                _shown_params(request.params),
            )  # fmt: skip
        else:
            logger.info("request %s (%s): %d tokens to pool", request.request_id, current_request_id.get(), num_tokens)

    def on_output(self, output: RequestOutput) -> None:
        """Notes tokens, texts and ends of completions."""
        self._id_to_outcome[output.request_id].note(output)

    def on_pooled(self, request_id: str) -> None:
        """Notes that a prompt was pooled."""
        self._id_to_outcome[request_id].is_pooled = True

    def on_finished(self, request_id: str, error: Exception | None) -> None:
        outcome = self._id_to_outcome.pop(request_id)
        outcome.error = None if error is None else type(error).__name__
        logger.info("request %s: %s after %.3f s", request_id, outcome.shown(), self._clock() - outcome.start_s)

    def _shown_prompt(self, request: SubmittedRequest) -> str:
        if request.prompt is not None:
            return shortened(request.prompt, self._config.max_chars)
        limit = self._config.max_chars
        token_ids = request.prompt_token_ids if limit is None else request.prompt_token_ids[:limit]
        return f"{list(token_ids)}{'...' if len(token_ids) < len(request.prompt_token_ids) else ''}"


class _Outcome:
    """Tokens, texts and ends of a request so far."""

    def __init__(self, config: RequestLogConfig, start_s: float) -> None:
        self.start_s = start_s
        self.is_pooled = False
        self._config = config
        self._num_tokens = 0
        self._index_to_reason: dict[int, str] = {}
        self._index_to_text: dict[int, str] = {}
        self.error: str | None = None

    def note(self, output: RequestOutput) -> None:
        """Adds one output; kept texts are bounded by what will be shown of them."""
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
        if self.error is None and self.is_pooled:
            return "pooled"
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
