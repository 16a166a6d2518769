"""Runs the batches of one API process, several at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from llmstack_server.apis.batches.batch_run import BatchRun
from llmstack_server.apis.batches.errors import BatchError, BatchLostError
from llmstack_server.apis.batches.fair_places import FairPlaces
from llmstack_server.apis.batches.objects import error_list
from llmstack_server.apis.batches.sender import Sender
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.apis.batches.table import UnfinishedBatch
from llmstack_server.apis.batches.transport import AppTransport
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import EVERYONE, Client, clients_of
from llmstack_server.web.errors import HTTPError
from llmstack_types.json_values import JSONObject

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
EXPIRE_EVERY_S = 60.0
# Batches of one key that run at a time; the others of it wait.
MAX_RUNNING_PER_KEY = 4
# A batch whose lines end each process that reads them must not do so for ever.
MAX_ATTEMPTS = 5
INVALID_KEY = ("invalid_api_key", "The API key of this batch is no longer valid.")
QUARANTINED = ("request_quarantined", f"The server has ended {MAX_ATTEMPTS} times while it read this batch.")
INTERNAL_ERROR = ("internal_error", "Internal error")


class BatchWorker:
    """The batches that this process runs; after a restart it goes on with those that had not ended."""

    def __init__(self, state: ServerState, store: FileStore) -> None:
        self._state = state
        self._store = store
        clients = [replace(client, is_batch=True) for client in clients_of(state.config) or (EVERYONE,)]
        self._tenant_to_client = {client.tenant: client for client in clients}
        self._places = FairPlaces(store.config.max_concurrency)
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._expired_s = 0.0
        self.process, self.num_processes = 0, 1
        if state.peers is not None:
            self.process, self.num_processes = state.peers.index, state.peers.count

    def begin(self) -> None:
        """Begins to run batches; the engine is ready."""
        self._task = asyncio.get_running_loop().create_task(self._run_all())

    def notice(self) -> None:
        """A batch has been added."""
        self._changed.set()

    async def stop(self) -> None:
        """Stops where the batches stand; a later server goes on."""
        tasks = [] if self._task is None else [self._task, *(task for _, task in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()

    async def _run_all(self) -> None:
        is_counted = False
        while True:
            self._changed.clear()
            try:
                if not is_counted:
                    await self._store.run(lambda: self._store.table.count_interrupted(self.process, self.num_processes))
                    is_counted = True
                await self._begin_waiting()
            except HTTPError as error:
                logger.error("batches wait: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPIRE_EVERY_S):  # `wait_for` may lose a cancellation
                    await self._changed.wait()

    async def _begin_waiting(self) -> None:
        """Begins the batches that wait, the oldest first, as many as each key may run at a time."""
        if time.monotonic() - self._expired_s >= EXPIRE_EVERY_S:
            await self._store.run(self._store.expire)
            self._expired_s = time.monotonic()
        unfinished = await self._store.run(lambda: self._store.table.unfinished(self.process, self.num_processes))
        owner_to_num_running = Counter(owner for owner, _ in self._running.values())
        for found in unfinished:
            owner, batch_id = found.owner, found.batch["id"]
            has_room = owner_to_num_running[owner] < MAX_RUNNING_PER_KEY or found.batch["status"] == "cancelling"
            if batch_id in self._running or not has_room:
                continue
            owner_to_num_running[owner] += 1
            task = asyncio.get_running_loop().create_task(self._run_until_over(found))
            self._running[batch_id] = owner, task

    async def _run_until_over(self, found: UnfinishedBatch) -> None:
        """Runs a batch; where that fails for now, `_run_all` begins it again after a pause."""
        batch_id = found.batch["id"]
        try:
            await self._run(found)
        except (HTTPError, BatchError) as error:
            logger.error("batch %s waits: %s", batch_id, error)
            await asyncio.sleep(PAUSE_S)
        except BatchLostError:
            logger.error("batch %s is not there any more", batch_id)
        except Exception:  # one batch must not end the others
            logger.exception("batch %s: internal error", batch_id)
            with suppress(HTTPError):
                await self._fail(found.batch, *INTERNAL_ERROR)
        finally:
            del self._running[batch_id]
            self._changed.set()

    async def _run(self, found: UnfinishedBatch) -> None:
        client = self._tenant_to_client.get(found.owner)
        if client is None:
            await self._fail(found.batch, *INVALID_KEY)
        elif found.attempts >= MAX_ATTEMPTS:
            await self._fail(found.batch, *QUARANTINED)
        else:
            logger.info("batch %s: %s", found.batch["id"], found.batch["status"])
            await BatchRun(self._store, found.owner, found.batch, self._sender(client)).run()

    def _sender(self, client: Client) -> Sender:
        state = self._state
        if state.application is None:
            raise BatchError("the application is not complete")
        transport = AppTransport(state.application, state.engine.check_health, client)
        return Sender(transport, self._places, state.queue, state.config.http.max_body_bytes)

    async def _fail(self, batch: JSONObject, code: str, message: str) -> None:
        errors = error_list([{"code": code, "message": message, "param": None, "line": None}])
        changes = {"status": "failed", "failed_at": int(time.time()), "errors": errors}
        await self._store.run(lambda: self._store.table.change_batch(batch["id"], changes, ended=True))
