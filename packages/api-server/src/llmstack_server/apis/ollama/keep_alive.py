"""`keep_alive` of a request: how long the model stays awake after it."""

from __future__ import annotations

import re
from typing import Final

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client

MAX_KEEP_S: Final = 86_400.0
"""What stands for ever: a day after the last request."""
_MAX_CHARS: Final = 64
"""Of a text: no time that anyone writes is longer."""
_DURATION: Final = re.compile(r"-?(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+")
_PART: Final = re.compile(r"([0-9.]+)(ms|s|m|h)")
_UNIT_TO_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_model(state: ServerState, value: object) -> bool:
    """Notes how long the model stays awake after the current request; whether the request sends it to sleep.

    It has an effect where the engine sleeps by itself (`--idle-sleep`). Less than that time needs an operator, or a key
    that alone has used the model since it woke: others would wait for its next wake.

    Raises:
        InvalidRequestError: It is no time.
    """
    seconds = read_keep_alive(value)
    if seconds is None or state.idle is None:
        return False
    client = current_client.get()
    return state.idle.keep(seconds, client.tenant, is_operator=client.is_operator) and not seconds


def read_keep_alive(value: object) -> float | None:
    """Seconds, at most a day; None where nothing is given.

    Raises:
        InvalidRequestError: It is neither a number of seconds nor a text such as `5m` or `1h30m`; negative is for ever.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(max(min(value, MAX_KEEP_S), -1))  # an integer of 400 digits is no float
    elif isinstance(value, str) and len(value) <= _MAX_CHARS and _is_time(value):
        parts = _PART.findall(value)
        seconds = sum(float(number) * _UNIT_TO_S[unit] for number, unit in parts) if parts else abs(float(value))
        seconds = -seconds if value.startswith("-") else seconds
    else:
        raise request_errors.invalid_value("keep_alive", "expected seconds, or a time such as '5m'; negative for ever")
    return MAX_KEEP_S if seconds < 0 else min(seconds, MAX_KEEP_S)


def _is_time(text: str) -> bool:
    return bool(_DURATION.fullmatch(text) or re.fullmatch(r"-?[0-9]{1,9}", text))
