"""Sessions of agents as a load: the next turn is sent some time after an answer."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmstack_bench.client import CompletionClient
from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult, Progress, duration_s
from llmstack_bench.result import RequestResult
from llmstack_bench.workload import BenchRequest, Message, SessionWriter, ToText, WrittenSession, check_total
from llmstack_types.agent_profiles import AgentWorkload
from llmstack_types.agents import AgentSession, AgentTurn, parse_sessions

Encode = Callable[[BenchRequest], bytes]

TURN_GROUPS = ((1, 1), (2, 5), (6, 20), (21, 1 << 62))
# An answer that is cut off would have been longer by this factor.
CANCELLED_FACTOR = 2


def read_sessions(path: Path, limit: int) -> list[AgentSession]:
    """The first sessions of a file; see `llmstack_types.agents`.

    Raises:
        BenchError: The file cannot be read, or a line is not of that format.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_sessions(lines, limit)
    except UnicodeDecodeError as error:
        raise BenchError(f"--dataset-path {path}: is not UTF-8 text", exit_code=2) from error
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}", exit_code=2) from error
    except ValueError as error:
        raise BenchError(f"--dataset-path {path}: {error}", exit_code=2) from error


def session_maker(
    path: Path | None, workload: AgentWorkload, to_text: ToText, vocab_size: int
) -> Callable[[int], list[BenchRequest]]:
    """A function from a seed to the first requests of all sessions, each of which has its session.

    Raises:
        BenchError: The file cannot be read, or a value is out of range.
    """
    read = None if path is None else read_sessions(path, workload.num_sessions)

    def make(seed: int) -> list[BenchRequest]:
        try:
            sessions = read or replace(workload, seed=seed).sessions()
        except ValueError as error:
            raise BenchError(f"--dataset-name agents: {error}", exit_code=2) from error
        check_total(sum(map(_num_written_tokens, sessions)))
        writer = SessionWriter(seed, to_text, vocab_size)
        return [_first_request(writer, session) for session in sessions]

    return make


def _first_request(writer: SessionWriter, session: AgentSession) -> BenchRequest:
    prompt = [writer.system(session), writer.message(session, 0)]
    begun = WrittenSession(session, writer)
    return BenchRequest(prompt, session.turns[0].num_output_tokens, session.start_s, session=begun)


def check_sessions(*, is_chat: bool) -> None:
    """Raises BenchError unless the load goes to a route of chats."""
    if not is_chat:
        raise BenchError("--dataset-name agents: needs --endpoint /v1/chat/completions", exit_code=2)


def num_turns(sessions: Iterable[AgentSession]) -> int:
    """The requests of all sessions and their subagents."""
    return sum(1 + num_turns(turn.subagents) for session in sessions for turn in session.turns)


def _num_written_tokens(session: AgentSession) -> int:
    own = session.num_prefix_tokens + sum(turn.num_new_tokens for turn in session.turns)
    return own + sum(_num_written_tokens(one) for turn in session.turns for one in turn.subagents)


@dataclass(slots=True)
class SessionLoad:
    """Sends the turns of sessions to one server, each after the answer before it.

    Attributes:
        writer: Writes the messages, with the seed of the first requests.
        encode: Makes the body of a request.
        speed: 2 halves all pauses, and the times between the starts.
        gate: Limits the requests in flight; None is no limit.
    """

    client: CompletionClient
    writer: SessionWriter
    encode: Encode
    speed: float = 1.0
    gate: asyncio.Semaphore | None = None
    on_result: Progress | None = None
    results: list[RequestResult] = field(default_factory=list)
    _started_s: float = 0.0
    _num_open: int = 0
    _most_open: int = 0

    async def run(self, requests: Sequence[BenchRequest]) -> LoadResult:
        """Runs the sessions of these first requests to their ends. A session ends where a request fails."""
        cpu_s, self._started_s = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                if request.session is not None:
                    group.create_task(self._run_root(request.session.session))
        return LoadResult(self.results, duration_s(self.results), time.process_time() - cpu_s, self._most_open)

    async def _run_root(self, session: AgentSession) -> None:
        await asyncio.sleep(session.start_s / self.speed)
        await self._run(session, [self.writer.system(session)])

    async def _run(self, session: AgentSession, beginning: list[Message]) -> None:
        context = list(beginning)
        for place, turn in enumerate(session.turns):
            await asyncio.sleep(turn.pause_s / self.speed)
            if turn.restarts:
                context = list(beginning)
            context.append(self.writer.message(session, place))
            result = await self._send(turn, context, place)
            if result.error is not None:
                return
            # Without an answer the next message of the user would follow another one, which some templates refuse.
            answer = "" if turn.is_cancelled else "".join(result.texts)
            context.append({"role": "assistant", "content": answer or "."})
            await asyncio.gather(*(self._run_subagent(one, context) for one in turn.subagents))

    async def _run_subagent(self, session: AgentSession, parent_context: list[Message]) -> None:
        await asyncio.sleep(session.start_s / self.speed)
        forks = session.forks_context
        await self._run(session, list(parent_context) if forks else [self.writer.system(session)])

    async def _send(self, turn: AgentTurn, context: list[Message], place: int) -> RequestResult:
        factor = CANCELLED_FACTOR if turn.is_cancelled else 1
        body = self.encode(BenchRequest(list(context), turn.num_output_tokens * factor))
        most = turn.num_output_tokens if turn.is_cancelled else None
        if self.gate is not None:
            await self.gate.acquire()
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        try:
            result = await self.client.send(body, self._started_s, keeps_text=True, max_chunks=most)
        finally:
            self._num_open -= 1
            if self.gate is not None:
                self.gate.release()
        result.turn = place + 1
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)
        return result


def agent_values(completed: Sequence[RequestResult]) -> dict[str, float]:
    """Figures of sessions: tokens found in the server's cache, and the first token by group of turns."""
    turns = [result for result in completed if result.turn is not None and result.ttft_s is not None]
    if not turns:
        return {}
    values: dict[str, float] = {}
    counted = [result for result in turns if result.num_cached_tokens is not None and result.num_prompt_tokens]
    if counted:
        num_prompt = sum(result.num_prompt_tokens or 0 for result in counted)
        values["cached_fraction"] = sum(result.num_cached_tokens or 0 for result in counted) / num_prompt
    for first, last in TURN_GROUPS:
        group = [1000 * (result.ttft_s or 0.0) for result in turns if first <= (result.turn or 0) <= last]
        if group:
            name = f"{first}" if first == last else f"{first}_to_{last}" if last < 1 << 62 else f"from_{first}"
            values[f"median_ttft_turn_{name}_ms"] = statistics.median(group)
    return values
