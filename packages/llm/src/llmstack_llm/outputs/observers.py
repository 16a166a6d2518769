"""Observers of requests, called where one is configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_types import EngineCoreOutput, PoolingParams, SamplingParams

Arguments = ParamSpec("Arguments")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request at the moment of its submission.

    Attributes:
        prompt: The text, or None where token ids were given.
        params: Sampling parameters, or those of pooling.
        num_completions: Completions that the engine core computes.
        tenant: Opaque id of the client.
        cache_salt, lora_name: Prefixes are shared among requests with the same ones.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams | PoolingParams
    num_completions: int = 1
    tenant: str = ""
    cache_salt: str = ""
    lora_name: str = ""


class RequestObserver:
    """Base of observers, whose methods do nothing. They run on the event loop and must not block.

    Their errors are logged: a user's observer must not end the requests of all users.
    """

    def on_submitted(self, request: SubmittedRequest) -> None:
        """A request has passed every check and goes to the engine core."""

    def on_engine_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """A step of the engine core has returned outputs, for any requests."""

    def on_output(self, output: RequestOutput) -> None:
        """A request has a new output."""

    def on_pooled(self, request_id: str) -> None:
        """A prompt was pooled."""

    def on_finished(self, request_id: str, error: Exception | None) -> None:
        """A request has ended, by an error where there is one; an aborted one has no finished output before."""


def notify(
    observers: Sequence[RequestObserver],
    method: Callable[Concatenate[RequestObserver, Arguments], None],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> None:
    """Calls a method of `RequestObserver` of every observer; errors are logged."""
    for observer in observers:
        try:
            getattr(observer, method.__name__)(*arguments, **named)
        except Exception:  # a fault of an observer must not end a request
            logger.exception("an observer of requests failed")
