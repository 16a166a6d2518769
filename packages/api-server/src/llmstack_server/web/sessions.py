"""Names of sessions in requests, and requests that end a session."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, NamedTuple

from starlette.types import Scope

from llmstack_llm import request_errors

HEADER: Final = b"x-session-id"
MAX_NAME_CHARS: Final = 256
SESSION_FIELDS: Final = frozenset({"session_id", "session_final", "prompt_cache_key"})


class SessionHint(NamedTuple):
    """The session that the current request names; a name belongs to its key, and finds nothing by itself."""

    name: str = ""
    is_final: bool = False


NO_HINT: Final = SessionHint()
current_session: ContextVar[SessionHint] = ContextVar("session", default=NO_HINT)


def hint_of_header(scope: Scope) -> SessionHint:
    """The name in `X-Session-ID`, where it is one; a field of the body replaces it."""
    value = next((value for name, value in scope["headers"] if name == HEADER), b"")
    text = value.decode("latin-1").strip()
    return SessionHint(text) if 0 < len(text) <= MAX_NAME_CHARS else NO_HINT


def set_session(session_id: str | None, session_final: bool | None, prompt_cache_key: str | None) -> None:
    """Notes what the body of the current request says.

    Raises:
        InvalidRequestError: A name is too long.
    """
    for param, name in (("session_id", session_id), ("prompt_cache_key", prompt_cache_key)):
        check_name(param, name)
    name = session_id or current_session.get().name or prompt_cache_key or ""
    current_session.set(SessionHint(name, bool(session_final)))


def check_name(param: str, name: str | None) -> None:
    """Refuses a name of a session that is too long.

    Raises:
        InvalidRequestError: It is.
    """
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise request_errors.string_too_long(param, MAX_NAME_CHARS, len(name))
