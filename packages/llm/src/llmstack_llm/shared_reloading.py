"""Steps of a reload that several front ends do together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.engine_front_end import EngineFrontEnd
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.reloading import (
    ReloadError,
    as_reload_errors,
    check_can_reload,
    check_longest,
    facts_now,
    identify_adapters,
    needed_adapters,
    plan_reload,
    ready_check,
)
from llmstack_llm.requests import Adapter
from llmstack_types import EngineReady, EngineStartError, LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client import ReloadingClient


class SharedReload:
    """One front end of several, over engine cores that another process starts and ends.

    `check` in one of them, `prepare` in all, and once all are prepared `switch` in all, or else `drop`. After `switch`
    nothing refers to the engine cores before, as soon as `is_over`.
    """

    def __init__(self, engine: EngineFrontEnd, client: ReloadingClient) -> None:
        self._engine = engine
        self._client = client
        self._next: tuple[ModelConfig, EngineReady] | None = None
        self._wanted: list[Adapter] | None = None
        self._moves = False

    @property
    def is_over(self) -> bool:
        """False while requests run in the engine cores before, or others are being started."""
        return not self._client.is_reloading

    @property
    def num_finishing(self) -> int:
        """Requests that finish in the engine cores before."""
        return self._client.num_finishing

    async def check(self, args: EngineArgs | None) -> None:
        """Checks what can be known before anything is started.

        Raises:
            ReloadError: The engine cores cannot be exchanged for those of `args`.
        """
        await check_can_reload(self._client)
        if args is None:
            return
        with as_reload_errors():
            _, _, problem = await plan_reload(self._engine, self._client, args)
        if problem:
            raise ReloadError(f"{problem}; with several API processes there has to be room for both")

    async def prepare(
        self,
        args: EngineArgs | None,
        adapters: Sequence[tuple[str, str]] | None,
        addresses: Sequence[str],
        *,
        moves: bool,
    ) -> None:
        """Attaches to the next engine cores, which get no request yet.

        `args`: Their options; None keeps the engine cores, and prepares the adapters alone.
        `moves`: Running requests have to be able to go on there.

        Raises:
            ReloadError: They cannot be used; nothing has changed.
        """
        engine, client = self._engine, self._client
        await check_can_reload(client)
        with as_reload_errors():
            wanted = None if adapters is None else await asyncio.to_thread(identify_adapters, engine, adapters)
            if args is not None:
                before = facts_now(engine)
                model_config, config, _ = await plan_reload(engine, client, args)
                started = await client.prepare(config, needed_adapters(engine, wanted), addresses)
                try:
                    ready_check(before, model_config)(started)
                    if moves:
                        check_longest(engine, started)
                        client.check_move()
                except LLMStackError:
                    await client.drop()
                    raise
                self._next = (model_config, started)
            for adapter in wanted or () if args is None else ():
                await engine.adapters.wait_until_loaded(adapter, engine.load_adapter_files)
        self._wanted, self._moves = wanted, moves

    def switch(self) -> tuple[EngineReady | None, int, list[Adapter]]:
        """Sends new requests to the next engine cores, and takes the adapters, at once.

        Requests that were to move finish where they are, if their engine core has crashed since `prepare`.

        Returns what the next engine cores said, the number of requests that moved, and the adapters that are gone.

        Raises:
            ReloadError: The next engine cores have ended for good.
        """
        ready, num_moved = None, 0
        if self._next is not None:
            model_config, started = self._next
            with as_reload_errors():
                try:
                    num_moved = self._client.switch(moves=self._moves)
                except EngineStartError:
                    if not self._moves:
                        raise
                    self._client.switch()
            ready = self._engine.follow_reload(model_config, started)
        gone = [] if self._wanted is None else self._engine.replace_adapters(self._wanted)
        self._next = self._wanted = None
        return ready, num_moved, gone

    async def drop(self) -> None:
        """Leaves the next engine cores; the ones before serve on."""
        self._next = self._wanted = None
        await self._client.drop()
