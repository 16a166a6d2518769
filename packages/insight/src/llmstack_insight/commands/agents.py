"""Flags of `llmstack simulate` for sessions of agents.

`llmstack --help` imports it, so it imports little.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_insight.commands.arguments import above_zero, positive
from llmstack_types.vocabulary import AgentProfileName, words_of

if TYPE_CHECKING:
    from llmstack_types.agents import AgentSession


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--dataset agents`, and what describes the sessions."""
    add = parser.add_argument_group("sessions of agents").add_argument
    add("--dataset", choices=("agents",), help="make sessions of agents, in place of a trace from a file")
    add(
        "--agent-profile",
        choices=words_of(AgentProfileName),
        default="steady",
        help="pauses of tools and people: 'steady' as published, 'spread' half or double of that in each session, "
        "'tenants' three keys at half, once and double (default: steady)",
    )
    add("--agent-sessions", type=positive, default=40, metavar="N", help="how many, without subagents (default: 40)")
    add("--agent-gap", type=above_zero, default=30.0, metavar="S", help="mean seconds between starts (default: 30)")
    add("--length-scale", type=above_zero, default=1.0, metavar="X", help="factor for numbers of tokens (default: 1)")
    add("--seed", type=int, default=0, help="equal seeds give equal sessions (default: 0)")
    add(
        "--memory-share",
        type=above_zero,
        metavar="F",
        help="blocks of the cache, as a share of those that all open sessions need at the same time; takes a second "
        "run",
    )
    add("--write-sessions", type=Path, metavar="FILE", help="write the sessions, as --trace FILE --format agents reads")


def sessions_of(namespace: argparse.Namespace) -> list[AgentSession] | None:
    """The sessions that the flags describe, which are written where that is asked for; None with another trace.

    Raises:
        SimulationError: A flag is wrong, or the file cannot be read or written.
    """
    from llmstack_engine_client.prediction.errors import SimulationError
    from llmstack_types.agent_profiles import AgentWorkload
    from llmstack_types.agents import parse_sessions, write_sessions

    is_read = namespace.format == "agents"
    if namespace.dataset is None and not is_read:
        if namespace.memory_share is not None or namespace.write_sessions is not None:
            raise SimulationError("--memory-share and --write-sessions are for sessions of agents")
        return None
    path = namespace.trace if is_read else namespace.write_sessions
    try:
        if is_read:
            with namespace.trace.open(encoding="utf-8") as lines:
                sessions = parse_sessions(lines, namespace.limit)
        else:
            sessions = AgentWorkload(
                namespace.agent_sessions, namespace.agent_profile, namespace.seed, namespace.agent_gap,
                namespace.length_scale,
            ).sessions()[: namespace.limit]  # fmt: skip
        if namespace.write_sessions is not None:
            path = namespace.write_sessions
            with path.open("w", encoding="utf-8") as file:
                file.writelines(write_sessions(sessions))
    except UnicodeDecodeError as error:
        raise SimulationError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise SimulationError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise SimulationError(f"{path or '--dataset agents'}: {error}") from error
    return sessions
