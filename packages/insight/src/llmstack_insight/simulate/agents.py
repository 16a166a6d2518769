"""Sessions of agents through the real scheduler and cache, on a virtual clock.

The next turn of a session comes some time after the answer to the one before. So it arrives later where the engine is
slower, unlike the requests of a trace.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from llmstack_engine_client.prediction.cost_model import CostModel, LinearCostModel
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.simulate.agent_report import AgentReport
from llmstack_insight.simulate.cache_policies import Access, PrefixTree, replay_cache
from llmstack_insight.simulate.replica import CALL_TOKEN_ID, OUTPUT_TOKEN_ID, PromptCacheManager, Replica, last_token_id
from llmstack_insight.simulate.report import Report
from llmstack_insight.simulate.simulation import SimulationConfig
from llmstack_types.agents import AgentSession, Asker
from llmstack_types.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class _Prompt(TraceRequest):
    """A request with its tokens."""

    token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Run:
    """One session, or one subagent, as far as it has come.

    Attributes:
        beginning: The tokens that its context begins with.
        context: The tokens behind them.
        chain: Its place in the tree of prefixes.
        num_known_tokens: The tokens of its next prompt that were computed before.
        num_unfinished: Its subagents that have not ended.
        parent: The session that waits for its end.
    """

    session: AgentSession
    beginning: tuple[int, ...]
    chain: int
    num_known_tokens: int
    parent: _Run | None = None
    context: tuple[int, ...] = ()
    next_turn: int = 0
    num_unfinished: int = 0

    @property
    def calls_tool(self) -> bool:
        """Whether the answer of its turn calls a tool, whose result is the next one."""
        following = self.session.turns[self.next_turn + 1 : self.next_turn + 2]
        return any(turn.asker is Asker.TOOL for turn in following)

    @property
    def has_turns(self) -> bool:
        """Whether another turn follows."""
        return self.next_turn < len(self.session.turns)


def simulate_agents(
    sessions: Sequence[AgentSession],
    config: SimulationConfig,
    cost_model: CostModel | None = None,
    memory_share: float | None = None,
) -> AgentReport:
    """Runs all sessions to their ends, and compares what the cache found with other policies.

    `memory_share`: Gives the cache this part of the blocks that all sessions need that are open at the same time, in
    place of `config.num_blocks`. It takes a second run.

    Raises:
        SimulationError: A setting is not valid, or the scheduler makes no progress.
    """
    if config.num_replicas > 1 or config.predicts or config.load is not None:
        raise SimulationError("sessions of agents are simulated on one replica, without --predict and --load")
    if memory_share is not None and (config.num_blocks is not None or not 0 < memory_share <= 1):
        raise SimulationError("the share of the memory must be above 0 and at most 1, without a number of blocks")
    if config.block_size < 1:
        raise SimulationError(f"block_size must be at least 1, got {config.block_size}")
    cost_model = cost_model or LinearCostModel()
    try:
        found = _AgentSimulation(sessions, config, cost_model).run()
        if memory_share is not None:
            num_blocks = max(1, round(memory_share * found.num_needed_blocks))
            found = _AgentSimulation(sessions, replace(config, num_blocks=num_blocks), cost_model).run()
    except ValueError as error:
        raise SimulationError(str(error)) from error
    found.memory_share = memory_share
    return found


class _AgentSimulation:
    def __init__(self, sessions: Sequence[AgentSession], config: SimulationConfig, cost_model: CostModel) -> None:
        longest, total = _sizes(sessions)
        limits = replace(config.scheduler, max_model_len=max(config.scheduler.max_model_len, longest))
        self._block_size = config.block_size
        num_blocks = config.num_blocks or total // config.block_size + 2 * len(sessions) + limits.max_num_rows
        if num_blocks * config.block_size < longest:
            raise SimulationError(f"the longest prompt and its answer, {longest} tokens, need more blocks")
        self._timing = Report(
            num_blocks=num_blocks,
            block_size=config.block_size,
            ttft_target_s=config.ttft_target_s,
            cost_model=cost_model,
        )
        self.report = AgentReport(self._timing, num_sessions=len(sessions))
        self._cache = PromptCacheManager(
            num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            caches_answers=True,
            knows_sessions=config.knows_sessions,
        )
        self._replica = Replica(limits, self._cache, cost_model, _token_ids, 2 * limits.max_num_rows, self._timing)
        self._num_segments = CALL_TOKEN_ID  # none of them is a token of answers
        self._prefixes: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {}
        self._known_prefixes: set[int] = set()
        self._tree = PrefixTree(config.block_size)
        self._accesses: list[Access] = []
        self._due: list[tuple[float, int, _Run]] = []
        self._num_due = 0
        self._running: dict[str, _Run] = {}
        self._open_tokens: dict[int, int] = {}
        self._num_open_tokens = 0
        for session in sessions:
            self._wait(self._begin(session), session.start_s)

    def run(self) -> AgentReport:
        """All sessions; the report has what the cache found, and what other policies find in the same order."""
        began_s = time.perf_counter()
        replica = self._replica
        while self._due or replica.has_work():
            if self._due and (not replica.has_work() or self._due[0][0] <= replica.now_s):
                due_s, _, run = heapq.heappop(self._due)
                self._submit(run, due_s)
                continue
            replica.step()
            self._take_firsts()
            ended, replica.ended_ids = replica.ended_ids, []
            for request_id in ended:
                self._end_turn(self._running.pop(request_id))
        report, timing = self.report, self._timing
        timing.num_preemptions, timing.num_evictions = replica.num_preemptions, replica.num_evictions
        timing.simulated_s, timing.num_computed_tokens = replica.now_s, [replica.num_computed_tokens]
        report.policies = replay_cache(self._tree, self._accesses, timing.num_blocks)
        timing.wall_s = time.perf_counter() - began_s
        return report

    def _begin(self, session: AgentSession, parent: _Run | None = None) -> _Run:
        if session.forks_context and parent is not None:
            beginning = parent.beginning + parent.context
            chain = self._tree.add(parent.chain, len(beginning))
            return _Run(session, beginning, chain, len(beginning) - 1, parent)
        key = session.tenant, session.prefix
        if key not in self._prefixes:
            self._prefixes[key] = self._segment(session.num_prefix_tokens), self._tree.add()
        beginning, prefix_chain = self._prefixes[key]
        return _Run(session, beginning, self._tree.add(prefix_chain, len(beginning)), 0, parent)

    def _wait(self, run: _Run, due_s: float) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (due_s, self._num_due, run))

    def _submit(self, run: _Run, due_s: float) -> None:
        turn = run.session.turns[run.next_turn]
        if turn.restarts:
            run.context = ()
            run.chain = self._tree.again(run.chain)
            run.num_known_tokens = min(run.num_known_tokens, len(run.beginning))
        elif (
            not run.next_turn and not run.session.forks_context and self._tree.parent(run.chain) in self._known_prefixes
        ):
            run.num_known_tokens = len(run.beginning)
        run.context += self._segment(turn.num_new_tokens)
        token_ids = run.beginning + run.context
        request_id = f"{run.session.id} {run.next_turn}"
        self._running[request_id] = run
        prompt = _Prompt(due_s, len(token_ids), turn.num_output_tokens, None, run.calls_tool, token_ids)
        self._replica.submit(request_id, prompt, due_s)
        self._note_open(run, len(run.context) + turn.num_output_tokens)

    def _take_firsts(self) -> None:
        """Notes of the requests that have begun how long they waited, and what they found."""
        begun, self._replica.begun_ids = self._replica.begun_ids, []
        first = len(self._timing.ttft_s) - len(begun)
        figures = zip(self._timing.ttft_s[first:], self._timing.hit_tokens[first:], strict=True)
        for request_id, (ttft_s, num_found) in zip(begun, figures, strict=True):
            run = self._running[request_id]
            num_prompt_tokens = len(run.beginning) + len(run.context)
            num_findable = min(run.num_known_tokens, num_prompt_tokens - 1) // self._block_size * self._block_size
            self.report.note_turn(
                run.next_turn,
                ttft_s,
                num_prompt_tokens,
                run.num_known_tokens,
                num_findable,
                min(num_found, num_findable),
            )
            turn = run.session.turns[run.next_turn]
            num_answer_tokens = 0 if turn.is_cancelled else turn.num_output_tokens - 1
            self._accesses.append(Access(run.chain, num_prompt_tokens, num_prompt_tokens + num_answer_tokens))
            parent = self._tree.parent(run.chain)
            if parent is not None:
                self._known_prefixes.add(parent)

    def _end_turn(self, run: _Run) -> None:
        turn = run.session.turns[run.next_turn]
        num_prompt_tokens = len(run.beginning) + len(run.context)
        run.num_known_tokens = num_prompt_tokens
        if not turn.is_cancelled:
            run.context += (OUTPUT_TOKEN_ID,) * (turn.num_output_tokens - 1) + (last_token_id(run.calls_tool),)
            run.num_known_tokens += turn.num_output_tokens - 1
        self._note_open(run, len(run.context))
        now_s = self._replica.now_s
        for session in turn.subagents:
            run.num_unfinished += 1
            self._wait(self._begin(session, run), now_s + session.start_s)
        run.next_turn += 1
        if not run.num_unfinished:
            self._go_on(run, now_s)

    def _go_on(self, run: _Run, now_s: float) -> None:
        """Waits for the next turn, or ends the session, and lets one go on that has waited for it."""
        if run.has_turns:
            self._wait(run, now_s + run.session.turns[run.next_turn].pause_s)
            return
        self._note_open(run, 0)
        parent = run.parent
        if parent is not None:
            parent.num_unfinished -= 1
            if not parent.num_unfinished:
                self._go_on(parent, now_s)

    def _note_open(self, run: _Run, num_tokens: int) -> None:
        """Counts the tokens that open sessions have: what a cache has to hold that computes none of them again."""
        before = self._open_tokens.pop(id(run), 0)
        if num_tokens:
            self._open_tokens[id(run)] = num_tokens
        self._num_open_tokens += num_tokens - before
        prefix_tokens = sum(len(beginning) for beginning, _ in self._prefixes.values())
        num_blocks = -(-(self._num_open_tokens + prefix_tokens) // self._block_size) + len(self._open_tokens)
        self.report.num_needed_blocks = max(self.report.num_needed_blocks, num_blocks)

    def _segment(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens unlike all others."""
        self._num_segments += 1
        return (self._num_segments,) * num_tokens


def _token_ids(request: TraceRequest) -> list[int]:
    return list(cast("_Prompt", request).token_ids)


def _sizes(sessions: Sequence[AgentSession]) -> tuple[int, int]:
    """The most tokens of a prompt and its answer, and the tokens of all sessions together."""
    longest = total = 0
    for session in sessions:
        longest, total = _count(session, session.num_prefix_tokens, longest, total + session.num_prefix_tokens)
    return longest, total


def _count(session: AgentSession, num_prefix_tokens: int, longest: int, total: int) -> tuple[int, int]:
    context = num_prefix_tokens
    for turn in session.turns:
        context = num_prefix_tokens if turn.restarts else context
        longest = max(longest, context + turn.num_new_tokens + turn.num_output_tokens)
        total += turn.num_new_tokens + turn.num_output_tokens
        context += turn.num_new_tokens + (0 if turn.is_cancelled else turn.num_output_tokens)
        for one in turn.subagents:
            start = context if one.forks_context else one.num_prefix_tokens
            longest, total = _count(one, start, longest, total + one.num_prefix_tokens)
    return longest, total
