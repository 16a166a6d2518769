"""Runs the batches of one API process, one after another."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from llmstack_server.apis.batches.batch_run import BatchRun
from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.objects import error_list
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.apis.batches.transport import AppTransport
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import EVERYONE, Client, clients_of
from llmstack_server.web.errors import HTTPError

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
EXPIRE_EVERY_S = 60.0


class BatchWorker:
    """The batches that this process runs; after a restart it goes on with those that had not ended."""

    def __init__(self, state: ServerState, store: FileStore) -> None:
        self._state = state
        self._store = store
        self._tenant_to_client = {client.tenant: client for client in clients_of(state.config)} or {"": EVERYONE}
        self._task: asyncio.Task[None] | None = None
        self._added = asyncio.Event()
        self._expired_s = 0.0
        self.process, self.num_processes = 0, 1
        if state.peers is not None:
            self.process, self.num_processes = state.peers.index, state.peers.count

    def begin(self) -> None:
        """Begins to run batches; the engine is ready."""
        self._task = asyncio.get_running_loop().create_task(self._run_all())

    def notice(self) -> None:
        """A batch has been added."""
        self._added.set()

    async def stop(self) -> None:
        """Stops where the batch stands; a later server goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.close()

    async def _run_all(self) -> None:
        while True:
            self._added.clear()
            try:
                await self._run_waiting()
            except (HTTPError, BatchError) as error:
                logger.error("batches wait: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPIRE_EVERY_S):  # `wait_for` may lose a cancellation
                    await self._added.wait()

    async def _run_waiting(self) -> None:
        if time.monotonic() - self._expired_s >= EXPIRE_EVERY_S:
            await self._store.run(self._store.expire)
            self._expired_s = time.monotonic()
        for owner, batch in await self._store.run(
            lambda: self._store.table.unfinished(self.process, self.num_processes)
        ):
            client = self._tenant_to_client.get(owner)
            if client is None:
                await self._fail(batch, "invalid_api_key", "The API key of this batch is no longer valid.")
            else:
                await self._run(owner, batch, client)

    async def _run(self, owner: str, batch: dict[str, Any], client: Client) -> None:
        if self._state.application is None:
            raise BatchError("the application is not complete")
        transport = AppTransport(self._state.application, self._state.engine.check_health, client)
        logger.info("batch %s: %s", batch["id"], batch["status"])
        try:
            await BatchRun(self._store, owner, batch, transport, self._has_queue).run()
        except (HTTPError, BatchError):
            raise
        except Exception:  # one batch must not end the others
            logger.exception("batch %s: internal error", batch["id"])
            await self._fail(batch, "internal_error", "Internal error")

    def _has_queue(self) -> bool:
        """Whether requests wait for the engine, which come before those of a batch."""
        return self._state.queue.state().num_waiting_tokens > 0

    async def _fail(self, batch: dict[str, Any], code: str, message: str) -> None:
        errors = error_list([{"code": code, "message": message, "param": None, "line": None}])
        changes = {"status": "failed", "failed_at": int(time.time()), "errors": errors}
        await self._store.run(lambda: self._store.table.change_batch(batch["id"], changes, ended=True))
