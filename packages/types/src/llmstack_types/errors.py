"""Errors that a front end shows to its user."""

from __future__ import annotations

from typing import ClassVar


class LLMStackError(Exception):
    """Base of the errors that llmstack raises on purpose."""


class InvalidRequestError(LLMStackError, ValueError):
    """A request that cannot be served as it stands; raised by admission, before anything is allocated.

    Attributes:
        message: One sentence for the user, from a fixed template; at most 64 characters of the input are echoed.
        param: The field at fault, such as `messages[2].content`; None where no single field is.
        code: Machine-readable cause of the error contract, such as `integer_above_max_value`; None where it has none.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class EngineDeadError(LLMStackError):
    """The engine core is gone; requests in flight are lost."""


class EngineStartError(LLMStackError):
    """The engine core could not start; the text says why in one line."""


class WeightsReloadedError(LLMStackError, ValueError):
    """Other weights could not be loaded after all, and those before are back; what was kept beside them is lost."""


class RequestFailedError(LLMStackError):
    """One admitted request failed inside the engine; the others go on.

    Attributes:
        TEXT: The text of a request that ends so, where it has no other one.
    """

    TEXT: ClassVar = "the request failed"

    def __init__(self, text: str = "") -> None:
        super().__init__(text or self.TEXT)


class NumericalError(RequestFailedError):
    """The model gave no usable probabilities for a request's next token; sent again, it would do the same."""

    TEXT: ClassVar = "the model gave no usable probabilities for the next token"


class NoTokenAllowedError(RequestFailedError):
    """A request's own fields leave no token that may come next; sent again, it would do the same."""

    TEXT: ClassVar = "the fields of this request leave no token that may come next"


class QuarantinedError(RequestFailedError):
    """A step fails with this request in it, even alone; sent again, it would do the same.

    Attributes:
        OUT_OF_MEMORY: The text for a request that needs more memory than there is.
        NOT_COMPUTABLE: The text for a request at which the model fails.
        NOT_CONSTRAINABLE: The text for a request whose output constraint fails while it is followed.
        KILLS_ENGINES: The text for a request that crashes the engine core.
        MEDIA_UNREADABLE: The text for a request with a picture, a sound or vectors whose bytes are gone.
        MEDIA_NOT_ENCODABLE: The text for a request with one at which the model's encoder fails.
        TEXTS: All of these.
    """

    OUT_OF_MEMORY: ClassVar = "the device has too little memory left to compute this request"
    NOT_COMPUTABLE: ClassVar = "the model failed at this request"
    NOT_CONSTRAINABLE: ClassVar = "the output constraint of this request failed"
    KILLS_ENGINES: ClassVar = "the engine crashed on this request"
    MEDIA_UNREADABLE: ClassVar = "an item of this prompt can no longer be read"
    MEDIA_NOT_ENCODABLE: ClassVar = "the model's encoder failed at an item of this prompt"
    TEXTS: ClassVar = (
        OUT_OF_MEMORY, NOT_COMPUTABLE, NOT_CONSTRAINABLE, KILLS_ENGINES, MEDIA_UNREADABLE, MEDIA_NOT_ENCODABLE,
    )  # fmt: skip


class EngineLostError(RequestFailedError):
    """The engine core died, and this request cannot go on in another one; sent again, it may well succeed."""

    TEXT: ClassVar = "the engine core died, and a request of this kind cannot go on in another one"


class ServerOverloadedError(LLMStackError):
    """A bounded queue is full; the same request may succeed later.

    Attributes:
        reason: The limit that was reached, by the name of its option; a label of a metric.
    """

    def __init__(self, message: str, *, reason: str = "max_num_queued_reqs") -> None:
        super().__init__(message)
        self.reason = reason


class TenantLimitError(LLMStackError):
    """A limit of one API key is used up; the same request may succeed later.

    Attributes:
        wait_s: After how many seconds.
    """

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
