"""Checks of what a request has besides its prompt and sampling fields."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import IntegerRule, check_text

INT32_MAX = 2**31 - 1
# The engine core takes ids of 512; those of several completions have a number before them.
MAX_REQUEST_ID_CHARS = 500
MAX_CACHE_SALT_CHARS = 1024
MAX_TENANT_CHARS = 128
MAX_SESSION_CHARS = 256
_PRIORITY = IntegerRule(-INT32_MAX, INT32_MAX)


def check_control_fields(
    request_id: object, *, priority: object = 0, cache_salt: object = "", tenant: object = "", session: object = "",
    **others: object,
) -> None:  # fmt: skip
    """Checks what callers give besides the prompt; `others` are fields that the front end makes itself.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    for param, value, max_chars in (
        ("request_id", request_id, MAX_REQUEST_ID_CHARS),
        ("cache_salt", cache_salt, MAX_CACHE_SALT_CHARS),
        ("tenant", tenant, MAX_TENANT_CHARS),
        ("session_id", session, MAX_SESSION_CHARS),
    ):
        if not isinstance(value, str):
            raise request_errors.invalid_type(param, "a string", value)
        if len(value) > max_chars:
            raise request_errors.string_too_long(param, max_chars, len(value))
        if not value.isascii():
            check_text(param, value)
    if not request_id:
        raise request_errors.empty_string("request_id")
    _PRIORITY.check("priority", priority)
