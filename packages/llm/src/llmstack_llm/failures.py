"""What a user gets for a request that failed inside the engine, out of what the engine core says of it."""

from __future__ import annotations

from llmstack_types import EngineLostError, NumericalError, QuarantinedError, RequestFailedError


def failure_of(error: str | None) -> RequestFailedError:
    """The typed error where the text is one of those that are agreed upon; `error` is `EngineCoreOutput.error`."""
    if error == NumericalError.TEXT:
        return NumericalError()
    if error == EngineLostError.TEXT:
        return EngineLostError()
    if error in QuarantinedError.TEXTS:
        return QuarantinedError(error)
    return RequestFailedError(error or "the request failed")
