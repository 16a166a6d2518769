"""Hooks of schemathesis: a deadline of a millisecond, which no server keeps, is not asked for.

The document allows it, and the answer is the 503 `deadline_unreachable` of the error contract. The check
`not_a_server_error` takes every 5xx for a failure. To expect a 503 of these routes would hide all others.
"""

from __future__ import annotations

from typing import Any

import schemathesis

LONG_MS = 600_000


@schemathesis.hook
def before_call(context: Any, case: Any, **kwargs: Any) -> None:
    """Makes a deadline that is valid a long one."""
    body = case.body
    given = body.get("deadline_ms") if isinstance(body, dict) else None
    if type(given) is int and 0 < given < LONG_MS:
        case.body = {**body, "deadline_ms": LONG_MS}
