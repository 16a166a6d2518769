"""Exchange of the engine cores of several API processes, all at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from llmstack_model_files import ModelFilesError
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.reload_options import START_NAME, ReloadEntry, engine_args_of
from llmstack_server.serving.engine_processes import launch_engine_processes
from llmstack_server.serving.launcher import one_line
from llmstack_server.serving.process_channel import Message
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client.processes.engines import EngineProcesses

logger = logging.getLogger(__name__)

# The processes check the files of a model before they wait for its engine cores, and load its adapters afterwards.
PREPARE_GRACE_S: Final = 120.0
SWITCH_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.01
_STOPS: Final = "the server stops"
# Orders after whose failure all goes on as before.
_REFUSABLE: Final = frozenset({"check", "prepare"})


class Member(Protocol):
    """An API process, as the supervisor of reloads sees it."""

    is_serving: bool

    def send(self, order: Message, /) -> None:
        """Sends an order; it is dropped where the process has ended."""
        ...


class _ReloadProblem(Exception):
    """The reload is refused and nothing has changed; the text says why."""


class ReloadSupervisor:
    """Starts engine cores beside those that serve, and lets all API processes go over to them at the same time.

    A process that ends before that, or cannot use them, is the end of the reload: the engine cores before serve on.
    One that ends afterwards is replaced by one over the engine cores of now. Those before end when no process has a
    request in them.

    Attributes:
        engines: The engine cores that take new requests; None before they are started.
    """

    def __init__(self, config: ServeConfig, members: Callable[[], Mapping[int, Member]]) -> None:
        self.engines: EngineProcesses | None = None
        self._config, self._members = config, members
        self._start_model_path = ""
        self._reloaded: Message = {"name": START_NAME, "previous_weights": []}
        self._next: EngineProcesses | None = None
        self._old: EngineProcesses | None = None
        self._unfinished: set[int] = set()  # processes with requests in the engine cores before
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._order: tuple[int, str] | None = None
        self._numbers = itertools.count()
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def is_ending(self) -> bool:
        """Whether the engine cores before have no request left, and have not ended yet."""
        return self._ending is not None

    def begin(self, engines: EngineProcesses) -> None:
        """The engine cores of the start."""
        self.engines, self._start_model_path = engines, engines.model_path

    def addresses_order(self, opened: EngineProcesses) -> Message:
        """The addresses that a new API process needs; `opened` are the engine cores of the start."""
        engines = self.engines or opened
        return {
            "model_path": engines.model_path, "addresses": engines.addresses, "reloaded": self._reloaded,
            "start_model_path": self._start_model_path, "ended": list(engines.ended.items()),
        }  # fmt: skip

    def is_current(self, engines: EngineProcesses) -> bool:
        """Whether the end of these engine cores is the end of the server."""
        return self._next is not engines and self._old is not engines

    def note_death(self, engines: EngineProcesses, line: str) -> None:
        """Engine cores that take no requests have ended for good."""
        logger.error("%s", line)
        if engines is self._next:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_ReloadProblem(line))

    def note(self, index: int, event: Message, watch: Callable[[EngineProcesses], None]) -> bool:
        """Takes an event of an API process; False for one of another kind.

        `watch`: Begins to watch engine cores.
        """
        if "reload" in event:
            self._begin_reload(index, event, watch)
        elif "reload_done" in event:
            waiting = self._waiting.get(index)
            if self._order == (event["reload_done"], event["step"]) and waiting is not None and not waiting.done():
                waiting.set_result(event)
        elif "reload_over" in event:
            self._end_old(index)
        else:
            return False
        return True

    def lose(self, index: int) -> None:
        """An API process has ended: its requests are lost, and it answers nothing."""
        waiting = self._waiting.get(index)
        if waiting is not None and not waiting.done():
            waiting.set_exception(_ReloadProblem(_STOPS if self._is_stopping else f"API process {index} has ended"))
        self._end_old(index)

    def begin_stop(self) -> None:
        """The server stops: a reload that has changed nothing yet is refused, and no other begins."""
        self._is_stopping = True
        if self._order is None or self._order[1] not in _REFUSABLE:
            return
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_ReloadProblem(_STOPS))

    async def stop(self) -> None:
        """Ends the engine cores beside those that take new requests."""
        self._is_stopping = True
        for task in (self._running, self._ending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for engines in (self._next, self._old):
            if engines is not None:
                await engines.stop()

    def _begin_reload(self, index: int, event: Message, watch: Callable[[EngineProcesses], None]) -> None:
        member = self._members()[index]
        problem = ""
        if self._is_stopping:
            problem = _STOPS
        elif self._running is not None and not self._running.done():
            problem = "another reload is running"
        elif not all(one.is_serving for one in self._members().values()):
            problem = "an API process is being replaced"
        if problem:
            member.send({"reload": "answer", "number": event["number"], "problem": problem})
            return
        self._running = asyncio.create_task(self._answer(member, event, watch))

    async def _answer(self, member: Member, event: Message, watch: Callable[[EngineProcesses], None]) -> None:
        answer: Message = {"reload": "answer", "number": event["number"], "problem": ""}
        try:
            answer |= await self._reload(event["reload"], bool(event["moves"]), watch)
        except _ReloadProblem as error:
            answer["problem"] = str(error)
        except Exception as error:  # a bug: the client must not wait for an answer
            logger.exception("a reload failed")
            answer["problem"] = type(error).__name__
        member.send(answer)

    async def _reload(self, name: str, moves: bool, watch: Callable[[EngineProcesses], None]) -> Message:
        entry, order = self._config.reload.entries[name], {"id": next(self._numbers)}
        if self._old is not None:
            await self._ask_all({**order, "reload": "check"}, SWITCH_TIMEOUT_S)
            await self._wait_for_end()
        engines = None if entry.changes_adapters_alone else await self._start(entry, watch)
        prepare: Message = {
            **order,
            "reload": "prepare",
            "name": name,
            "moves": moves,
            "model_path": "",
            "addresses": [],
        }
        if engines is not None:
            prepare |= {"model_path": engines.model_path, "addresses": engines.addresses}
        timeout_s = PREPARE_GRACE_S + (engines.configs[0].start_timeout_s if engines is not None else 0.0)
        try:
            await self._ask_all(prepare, timeout_s)
        except _ReloadProblem:
            await self._drop(order, engines)
            raise
        # From here on a process that ends is replaced by one over the next engine cores.
        if engines is not None:
            self._old, self.engines, self._next = self.engines, engines, None
            self._reloaded = {"name": name, "previous_weights": []}
        self._unfinished = set(self._serving())
        done = await self._ask_all({**order, "reload": "switch"}, SWITCH_TIMEOUT_S, is_final=True)
        if engines is not None and done:
            self._reloaded["previous_weights"] = done[0]["previous_weights"]
        return {key: sum(one[key] for one in done) for key in ("num_moved", "num_finishing")}

    async def _wait_for_end(self) -> None:
        """Waits for the end of the engine cores before, in which no request is left; processes say so a moment later.

        Raises:
            _ReloadProblem: They have not ended in time.
        """
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while self._old is not None:  # noqa: ASYNC110 - they end in a task, or when a process says so
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise _ReloadProblem("the engine core before the last reload has not ended yet; try again later") from None

    async def _start(self, entry: ReloadEntry, watch: Callable[[EngineProcesses], None]) -> EngineProcesses:
        def launch() -> EngineProcesses:
            arguments = engine_args_of(entry, self._config.engine, self._start_model_path)
            return launch_engine_processes(arguments, [])

        launching = asyncio.ensure_future(asyncio.to_thread(launch))
        try:
            self._next = await asyncio.shield(launching)
        except asyncio.CancelledError:
            await asyncio.wait([launching])
            if launching.exception() is None:
                await launching.result().stop()
            raise
        except (LLMStackError, ModelFilesError, OSError) as error:
            raise _ReloadProblem(one_line(error)) from error
        watch(self._next)
        return self._next

    async def _drop(self, order: Message, engines: EngineProcesses | None) -> None:
        try:
            await self._ask_all({**order, "reload": "drop"}, SWITCH_TIMEOUT_S, is_final=True)
        finally:
            self._next = None
            if engines is not None:
                await engines.stop()

    def _serving(self) -> dict[int, Member]:
        return {index: member for index, member in self._members().items() if member.is_serving}

    async def _ask_all(self, order: Message, timeout_s: float, *, is_final: bool = False) -> list[Message]:
        """The answers of all API processes that serve.

        `is_final`: Those that do not answer are left out: the order cannot be taken back.

        Raises:
            _ReloadProblem: One cannot follow the order, has ended, or does not answer.
        """
        if self._is_stopping and not is_final:
            raise _ReloadProblem(_STOPS)
        loop, members = asyncio.get_running_loop(), self._serving()
        self._waiting = {index: loop.create_future() for index in members}
        self._order = (order["id"], order["reload"])
        waiting = list(self._waiting.values())
        for member in members.values():
            member.send(order)
        when = asyncio.ALL_COMPLETED if is_final else asyncio.FIRST_EXCEPTION
        done, pending = await asyncio.wait(waiting, timeout=timeout_s, return_when=when)
        self._waiting, self._order = {}, None
        answers: list[Message] = []
        problem = f"{len(pending)} API processes do not answer" if pending else ""
        for one in done:
            error = one.exception()
            answer: Message = {"problem": str(error)} if error is not None else one.result()
            if answer["problem"]:
                problem = str(answer["problem"])
            else:
                answers.append(answer)
        if problem and not is_final:
            raise _ReloadProblem(problem)
        if problem:
            logger.error("a step of a reload is not over everywhere: %s", problem)
        return answers

    def _end_old(self, index: int) -> None:
        self._unfinished.discard(index)
        if self._unfinished or self._old is None or self._ending is not None or self._is_stopping:
            return
        self._ending = asyncio.create_task(self._stop_old(self._old))

    async def _stop_old(self, old: EngineProcesses) -> None:
        try:
            await old.stop()
        finally:
            self._old = self._ending = None
