"""Reloads in one of several API processes, by the orders of their supervisor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from llmstack_llm.reloading import ReloadError
from llmstack_model_files import ModelFilesError
from llmstack_server.options.reload_options import ReloadEntry, engine_args_of
from llmstack_server.serving.process_channel import Message
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM, EngineArgs
    from llmstack_llm.requests import Adapter
    from llmstack_llm.shared_reloading import SharedReload
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
MAX_NUM_ORDERS: Final = 8  # the supervisor waits for the answer to each


class ReloadFollower:
    """Takes `reload` orders, one after the other, and sends an event for each.

    Orders: `check`, `prepare`, `switch`, `drop` and `answer`. Events: `reload` asks for one, `reload_done` answers an
    order, and `reload_over` says that nothing here refers to the engine cores before.
    """

    def __init__(self, state: ServerState, engine: AsyncLLM, send: Callable[[Message], None]) -> None:
        self._state, self._engine, self._send = state, engine, send
        self._steps: SharedReload = engine.shared_reload()
        self._entry: ReloadEntry | None = None
        self._model_path = ""
        self._preparing: asyncio.Task[None] | None = None
        self._gone: list[Adapter] = []
        self._orders: asyncio.Queue[Message] = asyncio.Queue(MAX_NUM_ORDERS)
        self._asked: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._numbers = itertools.count()
        self._tasks = {asyncio.create_task(self._run())}

    def begin(self, reloaded: Message, start_model_path: str) -> None:
        """Applies a reload that happened before this process started."""
        state = self._state
        state.start_model_path = start_model_path
        state.weights_name = str(reloaded["name"])
        state.previous_weights.extend(reloaded["previous_weights"])
        state.__dict__.pop("system_fingerprint", None)

    async def reload(self, name: str, *, moves: bool) -> tuple[int, int]:
        """As `SharedReloads.reload`.

        Raises:
            ReloadError: Nothing has changed in any API process.
        """
        entry = self._state.config.reload.entries[name]
        args = await asyncio.to_thread(self._args, entry, None)
        await self._steps.check(args)
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"reload": name, "moves": moves, "number": number})
        try:
            counts: tuple[int, int] = await answer
        finally:
            del self._asked[number]
        await self._engine.forget_adapters(self._gone)  # no process lets a request name them any more
        return counts

    def take(self, order: Message) -> None:
        """Takes an order; called on the event loop."""
        if order["reload"] == "answer":
            self._take_answer(order)
            return
        if order["reload"] == "drop" and self._preparing is not None:
            self._preparing.cancel()
        self._orders.put_nowait(order)

    def _take_answer(self, order: Message) -> None:
        answer = self._asked.get(order["number"])
        if answer is None or answer.done():
            return
        if order["problem"]:
            answer.set_exception(ReloadError(order["problem"]))
        else:
            answer.set_result((order["num_moved"], order["num_finishing"]))

    async def _run(self) -> None:
        while True:
            order = await self._orders.get()
            done: Message = {"reload_done": order["id"], "step": order["reload"], "problem": ""}
            try:
                done |= await self._follow(order)
            except LLMStackError as error:
                done["problem"] = " ".join(str(error).split()) or type(error).__name__
            except Exception as error:  # a bug: the supervisor must not wait for an answer
                logger.exception("a reload failed")
                done["problem"] = type(error).__name__
            self._send(done)

    async def _follow(self, order: Message) -> dict[str, object]:
        if order["reload"] == "check":
            await self._steps.check(None)
            return {}
        if order["reload"] == "prepare":
            preparing = self._preparing = asyncio.create_task(self._prepare(order))
            try:
                await asyncio.wait([preparing])
            finally:
                self._preparing = None
            if preparing.cancelled():
                raise ReloadError("it was given up")
            preparing.result()
            return {}
        if order["reload"] == "drop":
            await self._steps.drop()
            return {}
        return self._switch()

    async def _prepare(self, order: Message) -> None:
        entry = self._entry = self._state.config.reload.entries[order["name"]]
        self._model_path = order["model_path"]
        args = self._args(entry, self._model_path)
        await self._steps.prepare(args, entry.adapters, order["addresses"], moves=order["moves"])

    def _switch(self) -> dict[str, object]:
        ready, num_moved, gone = self._steps.switch()
        if ready is not None and self._entry is not None:
            self._state.follow_reload(self._entry.name, ready)
            gone = []  # the next engine cores never had them
        self._gone = gone
        self._keep(asyncio.create_task(self._watch_end()))
        return {
            "num_moved": num_moved,
            "num_finishing": self._steps.num_finishing,
            "previous_weights": list(self._state.previous_weights),
        }

    async def _watch_end(self) -> None:
        while not self._steps.is_over:  # noqa: ASYNC110 - a request may take minutes
            await asyncio.sleep(POLL_S)
        self._send({"reload_over": True})

    def _args(self, entry: ReloadEntry, model_path: str | None) -> EngineArgs | None:
        """The options of the engine cores of an entry, in a folder that is known already or not; None for the same.

        Raises:
            ReloadError: The model cannot be found, or the settings contradict each other.
        """
        if entry.changes_adapters_alone:
            return None
        state = self._state
        first = state.start_model_path or ("" if state.ready is None else state.ready.model_path)
        try:
            return engine_args_of(entry, state.config.engine, first, model_path)
        except (LLMStackError, ModelFilesError) as error:
            raise ReloadError(str(error)) from error

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
