"""Seeded sessions of agents, fitted to published figures.

The figures: a median of 43 turns, of 142,000 tokens in the longest prompt and of 444 in an answer; over 96 % of the
prompts was computed before; 44 % of the sessions have subagents. Source: 472 public traces of coding agents, 2026.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmstack_types.agents import MAX_TURNS, AgentSession, AgentTurn, Asker
from llmstack_types.vocabulary import AgentProfileName

_SIGMAS_TO_P95 = 1.6449
MAX_SESSIONS = 100_000


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution by its median and its 95th percentile, cut off at four times of that."""

    median: float
    p95: float

    def draw(self, rng: random.Random) -> float:
        """A value, by the generator `rng`."""
        sigma = math.log(self.p95 / self.median) / _SIGMAS_TO_P95
        return min(self.median * math.exp(rng.gauss(0, sigma)), 4 * self.p95)

    def draw_count(self, rng: random.Random, most: int) -> int:
        """A whole number from 1 to `most`."""
        return max(1, min(most, round(self.draw(rng))))


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed at which the people and tools of a tenant answer.

    Attributes:
        tenant: Its name.
        weight: Its part of the sessions, relative to the other tenants.
        factors: Each session has one of these for all its pauses.
    """

    tenant: str
    weight: float
    factors: tuple[float, ...]


AGENT_PROFILES: Mapping[AgentProfileName, tuple[Pace, ...]] = {
    "steady": (Pace("a", 1, (1.0,)),),
    "spread": (Pace("a", 1, (0.5, 2.0)),),
    "tenants": (Pace("a", 6, (0.5,)), Pace("b", 3, (1.0,)), Pace("c", 1, (2.0,))),
}
"""By name, the tenants and their paces. A policy is judged by the worst of the three."""


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Sessions of agents; equal workloads give equal sessions.

    A session is a number of exchanges. In each, a person writes, and tools answer the model some times.

    Attributes:
        profile: One of `AGENT_PROFILES`.
        gap_s: Mean seconds between the starts of two sessions.
        tool_pause_s, person_pause_s: Before a turn, times the factor of the session.
        leave_share: Of the exchanges, those that are the last one of their session.
        num_tools: Answers of tools in an exchange.
        num_prefixes: Different agents of a tenant, each with a system prompt and tools of its own.
        max_context_tokens: A longer context is replaced by a summary.
        length_scale: Factor for all numbers of tokens.
    """

    num_sessions: int = 100
    profile: AgentProfileName = "steady"
    seed: int = 0
    gap_s: float = 30.0
    length_scale: float = 1.0
    tool_pause_s: Spread = Spread(4, 60)
    person_pause_s: Spread = Spread(90, 1200)
    leave_share: float = 0.15
    num_tools: Spread = Spread(6.4, 20)
    prefix_tokens: Spread = Spread(14_000, 25_000)
    message_tokens: Spread = Spread(120, 2_000)
    result_tokens: Spread = Spread(1_200, 9_200)
    output_tokens: Spread = Spread(444, 2_200)
    summary_tokens: Spread = Spread(5_000, 9_000)
    cancelled_share: float = 0.03
    subagent_share: float = 0.44
    num_subagents: Spread = Spread(2, 6)
    num_subagent_turns: Spread = Spread(12, 40)
    task_tokens: Spread = Spread(600, 3_000)
    fork_share: float = 0.5
    num_prefixes: int = 3
    max_context_tokens: int = 200_000

    def sessions(self) -> list[AgentSession]:
        """The sessions, by their start.

        Raises:
            ValueError: A value is out of range.
        """
        if self.profile not in AGENT_PROFILES:
            raise ValueError(f"the profile must be one of {', '.join(AGENT_PROFILES)}")
        if self.num_sessions < 1 or not self.gap_s > 0 or not 0 < self.length_scale <= 100:
            raise ValueError(
                "the number of sessions, their gap and the scale of lengths must be above 0, the scale at most 100"
            )
        if self.num_sessions > MAX_SESSIONS:
            raise ValueError(f"{self.num_sessions} sessions: {MAX_SESSIONS} are the most")
        return list(_Maker(self).sessions())


@dataclass
class _Context:
    """The context of a session, in tokens."""

    num_prefix_tokens: int
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prefix_tokens


class _Maker:
    def __init__(self, workload: AgentWorkload) -> None:
        self._workload = workload
        self._rng = random.Random(f"agents {workload.profile} {workload.seed}")  # noqa: S311 - a workload, not a secret
        self._paces = AGENT_PROFILES[workload.profile]
        self._prefix_tokens: dict[tuple[str, str], int] = {}

    def sessions(self) -> list[AgentSession]:
        rng, now_s, found = self._rng, 0.0, []
        for number in range(self._workload.num_sessions):
            pace = rng.choices(self._paces, [one.weight for one in self._paces])[0]
            found.append(self._session(f"s{number}", pace.tenant, now_s, rng.choice(pace.factors)))
            now_s += rng.expovariate(1 / self._workload.gap_s)
        return found

    def _session(self, session_id: str, tenant: str, start_s: float, factor: float) -> AgentSession:
        prefix = f"agent {self._rng.randrange(self._workload.num_prefixes)}"
        context = _Context(self._prefix(tenant, prefix))
        turns = self._with_subagents(session_id, tenant, factor, self._turns(context, factor))
        return AgentSession(session_id, tenant, start_s, prefix, context.num_prefix_tokens, tuple(turns))

    def _turns(self, context: _Context, factor: float) -> list[AgentTurn]:
        workload, rng, turns = self._workload, self._rng, list[AgentTurn]()
        while len(turns) < MAX_TURNS:
            pause_s = workload.person_pause_s.draw(rng) * factor if turns else 0.0
            turns.append(self._turn(context, Asker.PERSON, pause_s, workload.message_tokens))
            turns += self._tool_turns(context, factor, workload.num_tools.draw_count(rng, 200))
            if rng.random() < workload.leave_share:
                break
        return turns[:MAX_TURNS]

    def _tool_turns(self, context: _Context, factor: float, count: int) -> list[AgentTurn]:
        workload = self._workload
        return [
            self._turn(context, Asker.TOOL, workload.tool_pause_s.draw(self._rng) * factor, workload.result_tokens)
            for _ in range(count)
        ]

    def _turn(self, context: _Context, asker: Asker, pause_s: float, new_tokens: Spread) -> AgentTurn:
        workload, rng = self._workload, self._rng
        restarts = context.num_tokens > self._scaled(workload.max_context_tokens)
        if restarts:
            context.num_tokens = context.num_prefix_tokens
        num_new = self._tokens(workload.summary_tokens if restarts else new_tokens)
        num_output = self._tokens(workload.output_tokens)
        is_cancelled = rng.random() < workload.cancelled_share
        context.num_tokens += num_new + (0 if is_cancelled else num_output)
        return AgentTurn(asker, pause_s, num_new, num_output, is_cancelled, restarts)

    def _with_subagents(self, parent_id: str, tenant: str, factor: float, turns: list[AgentTurn]) -> list[AgentTurn]:
        """The turns, some of which begin subagents: in the given share of the sessions."""
        workload, rng = self._workload, self._rng
        places = [place for place, turn in enumerate(turns[:-1]) if not turn.is_cancelled]
        if rng.random() >= workload.subagent_share or not places:
            return turns
        num_contexts = _context_tokens(turns)
        for number in range(workload.num_subagents.draw_count(rng, 16)):
            place = rng.choice(places)
            subagent = self._subagent(f"{parent_id}.{number}", tenant, factor, num_contexts[place])
            turn = turns[place]
            turns[place] = AgentTurn(
                turn.asker, turn.pause_s, turn.num_new_tokens, turn.num_output_tokens, turn.is_cancelled,
                turn.restarts, (*turn.subagents, subagent),
            )  # fmt: skip
        return turns

    def _subagent(self, session_id: str, tenant: str, factor: float, num_parent_tokens: int) -> AgentSession:
        workload, rng = self._workload, self._rng
        forks = rng.random() < workload.fork_share
        prefix = "" if forks else "subagent"
        num_prefix_tokens = 0 if forks else self._prefix(tenant, prefix)
        context = _Context(num_prefix_tokens)
        turns = [self._turn(context, Asker.TOOL, 0.0, workload.task_tokens)]
        turns += self._tool_turns(context, factor, workload.num_subagent_turns.draw_count(rng, 200) - 1)
        if forks:  # it ends in place of outgrowing the limit: its beginning is not its own to replace
            turns = _within(turns, self._scaled(workload.max_context_tokens) - num_parent_tokens)
        return AgentSession(session_id, tenant, 0.0, prefix, num_prefix_tokens, tuple(turns))

    def _prefix(self, tenant: str, prefix: str) -> int:
        key = tenant, prefix
        if key not in self._prefix_tokens:
            self._prefix_tokens[key] = self._tokens(self._workload.prefix_tokens)
        return self._prefix_tokens[key]

    def _tokens(self, spread: Spread) -> int:
        return self._scaled(spread.draw(self._rng))

    def _scaled(self, num_tokens: float) -> int:
        return max(1, round(num_tokens * self._workload.length_scale))


def _context_tokens(turns: Sequence[AgentTurn]) -> list[int]:
    """After each turn, the tokens of the context behind the session's beginning."""
    found, num_tokens = [], 0
    for turn in turns:
        num_tokens = 0 if turn.restarts else num_tokens
        num_tokens += turn.num_new_tokens + (0 if turn.is_cancelled else turn.num_output_tokens)
        found.append(num_tokens)
    return found


def _within(turns: list[AgentTurn], num_tokens: int) -> list[AgentTurn]:
    """The first turns that need no more tokens together; the first one always."""
    kept: list[AgentTurn] = []
    for turn in turns:
        num_tokens -= turn.num_new_tokens + turn.num_output_tokens
        if kept and (num_tokens < 0 or turn.restarts):
            break
        kept.append(turn)
    return kept
