"""Sessions of agents, and their trace: a session for each line of JSON.

The load generator and the simulator replay the same sessions. The next turn of a session is sent some time after the
answer to the one before. So a trace has the pauses between turns, and a time of arrival for the first turn alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_TURNS = 10_000
MAX_SESSION_TOKENS = 1 << 24
MAX_FORKS_PER_TURN = 64
MAX_NAME_CHARS = 128
MAX_LINE_CHARS = 16 << 20
MAX_SECONDS = 1e9


class Asker(StrEnum):
    """Who sends a turn."""

    PERSON = "person"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a session.

    Its prompt is the session's context and the new tokens. The context is then that prompt, and the answer.

    Attributes:
        asker: Who sends it; the pause before it is that of a person, or of a tool.
        pause_s: Seconds from the end of the answer before, and of its subagents, until it is sent.
        num_new_tokens: What it adds to the context: a message, or the result of a tool.
        num_output_tokens: Of the answer.
        is_cancelled: The answer is cut off there, and does not become a part of the context.
        restarts: The context before it is dropped, except for the session's beginning: its new tokens are a summary.
        subagents: Sessions that begin with the end of the answer. The next turn waits for them.
    """

    asker: Asker
    pause_s: float
    num_new_tokens: int
    num_output_tokens: int
    is_cancelled: bool = False
    restarts: bool = False
    subagents: tuple[AgentSession, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One conversation of an agent with a model.

    Attributes:
        id: Its name, unlike that of any other in the trace.
        tenant: Whose it is. Nothing is shared between tenants.
        start_s: When its first turn is sent, since the trace began; of a subagent, since its parent's answer ended.
        prefix: Names the tokens that it begins with, such as the system prompt and the tools: equal names of one tenant
            stand for equal tokens. Empty for a subagent that begins with the context of its parent.
        num_prefix_tokens: How many these are; 0 with the context of a parent.
    """

    id: str
    tenant: str
    start_s: float
    prefix: str
    num_prefix_tokens: int
    turns: tuple[AgentTurn, ...]

    @property
    def forks_context(self) -> bool:
        """Whether it begins with the context of its parent."""
        return not self.prefix


def write_sessions(sessions: Iterable[AgentSession]) -> Iterator[str]:
    """One line of JSON for each session, its end of line included."""
    for session in sessions:
        yield json.dumps(_session_to_json(session), separators=(",", ":")) + "\n"


def parse_sessions(lines: Iterable[str], limit: int | None = None) -> list[AgentSession]:
    """The first `limit` sessions of a trace, ordered by their start.

    Raises:
        ValueError: A line is not of that format, or there is no session; the text names the line.
        UnicodeDecodeError: The lines come from a file that is not UTF-8.
    """
    sessions: list[AgentSession] = []
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        if len(sessions) == limit:
            break
        if not line.strip():
            continue
        try:
            if len(line) > MAX_LINE_CHARS:
                raise ValueError(f"has over {MAX_LINE_CHARS} characters")
            sessions.append(_session_of_json(json.loads(line), names))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"has no {error.args[0]}" if isinstance(error, KeyError) else str(error)[:120]
            raise ValueError(f"line {number} cannot be read: {reason}") from error
    if not sessions:
        raise ValueError("holds no sessions")
    return sorted(sessions, key=lambda session: session.start_s)


def _session_to_json(session: AgentSession) -> dict[str, Any]:
    return {
        "id": session.id,
        "tenant": session.tenant,
        "start_s": round(session.start_s, 3),
        "prefix": session.prefix,
        "prefix_tokens": session.num_prefix_tokens,
        "turns": [_turn_to_json(turn) for turn in session.turns],
    }


def _turn_to_json(turn: AgentTurn) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "asker": str(turn.asker),
        "pause_s": round(turn.pause_s, 3),
        "new_tokens": turn.num_new_tokens,
        "output_tokens": turn.num_output_tokens,
    }
    if turn.is_cancelled:
        fields["cancelled"] = True
    if turn.restarts:
        fields["restarts"] = True
    if turn.subagents:
        fields["subagents"] = [_session_to_json(session) for session in turn.subagents]
    return fields


def _session_of_json(fields: dict[str, Any], names: set[str], *, is_subagent: bool = False) -> AgentSession:
    session_id, prefix = _text(fields, "id", 1), _text(fields, "prefix", 0 if is_subagent else 1)
    if session_id in names:
        raise ValueError(f"the id {session_id!r} comes twice")
    names.add(session_id)
    num_prefix_tokens = _count(fields, "prefix_tokens", 1 if prefix else 0)
    if not prefix and num_prefix_tokens:
        raise ValueError("prefix_tokens must be 0 without a prefix")
    turns = fields["turns"]
    if not isinstance(turns, list) or not 1 <= len(turns) <= MAX_TURNS:
        raise ValueError(f"turns must be a list of 1 to {MAX_TURNS}")
    read = tuple(_turn_of_json(turn, names, is_subagent=is_subagent) for turn in turns)
    total = num_prefix_tokens + sum(turn.num_new_tokens + turn.num_output_tokens for turn in read)
    if total > MAX_SESSION_TOKENS:
        raise ValueError(f"a session has at most {MAX_SESSION_TOKENS} tokens")
    return AgentSession(
        session_id, _text(fields, "tenant", 0), _seconds(fields, "start_s"), prefix, num_prefix_tokens, read
    )


def _turn_of_json(fields: dict[str, Any], names: set[str], *, is_subagent: bool) -> AgentTurn:
    subagents = fields.get("subagents", [])
    if not isinstance(subagents, list) or len(subagents) > MAX_FORKS_PER_TURN:
        raise ValueError(f"subagents must be a list of at most {MAX_FORKS_PER_TURN}")
    if subagents and is_subagent:
        raise ValueError("a subagent has no subagents")
    return AgentTurn(
        Asker(fields["asker"]),
        _seconds(fields, "pause_s"),
        _count(fields, "new_tokens", 1),
        _count(fields, "output_tokens", 1),
        _flag(fields, "cancelled"),
        _flag(fields, "restarts"),
        tuple(_session_of_json(session, names, is_subagent=True) for session in subagents),
    )


def _text(fields: dict[str, Any], name: str, min_chars: int) -> str:
    value = fields[name]
    if not isinstance(value, str) or not min_chars <= len(value) <= MAX_NAME_CHARS:
        raise ValueError(f"{name} must be a text of {min_chars} to {MAX_NAME_CHARS} characters")
    return value


def _seconds(fields: dict[str, Any], name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float) or not 0 <= value < MAX_SECONDS:
        raise ValueError(f"{name} must be a number of seconds")
    return float(value)


def _count(fields: dict[str, Any], name: str, low: int) -> int:
    value = fields[name]
    if type(value) is not int or not low <= value <= MAX_SESSION_TOKENS:
        raise ValueError(f"{name} must be an integer in [{low}, {MAX_SESSION_TOKENS}]")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false")
    return value
