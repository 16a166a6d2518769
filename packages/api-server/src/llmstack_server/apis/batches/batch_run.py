"""The run of one batch beside live traffic, from its check to its files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchFault, BatchRequest, read_lines
from llmstack_server.apis.batches.objects import error_list
from llmstack_server.apis.batches.output import BatchOutput
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.apis.batches.transport import Transport, TransportError
from llmstack_server.web.errors import HTTPError, storage_unavailable

MAX_LINES = 50_000
MAX_ERRORS = 100
RETRIED_STATUSES = frozenset({429, 503})
RETRY_S = 2.0
POLL_S = 1.0
BUSY_S = 0.05
ANSWER_PURPOSE = "batch_output"


class BatchRun:
    """One batch, from the state that an earlier run left it in."""

    def __init__(
        self,
        store: FileStore,
        owner: str,
        batch: dict[str, Any],
        transport: Transport,
        is_busy: Callable[[], bool],
    ) -> None:
        """`is_busy` says whether other requests wait, which come first."""
        self._store = store
        self._owner = owner
        self._batch = batch
        self._transport = transport
        self._is_busy = is_busy
        self._work_path = store.path(f"{batch['id']}.work")
        self._counts = dict(batch["request_counts"])
        self._ends_as = ""

    async def run(self) -> None:
        """Runs the batch to its end.

        Raises:
            HTTPError: The folder cannot be used; a later run goes on.
            BatchError: The engine core has ended; a later run goes on.
        """
        if self._batch["status"] == "validating" and not await self._validate():
            return
        if self._batch["status"] == "in_progress":
            await self._answer_all()
        await self._finish()

    async def _validate(self) -> bool:
        """Checks the whole input, so that a batch with a wrong line costs nothing."""
        total, errors = await self._store.run(self._survey)
        now = int(time.time())
        if errors:
            changes = {"status": "failed", "failed_at": now, "errors": error_list(errors)}
            await self._change(changes, ended=True)
            return False
        self._counts["total"] = total
        changes = {"status": "in_progress", "in_progress_at": now, "request_counts": self._counts}
        return await self._change(changes, statuses=("validating",))

    def _survey(self) -> tuple[int, list[dict[str, Any]]]:
        total = 0
        errors: list[dict[str, Any]] = []
        try:
            file = self._open_input()
        except FileNotFoundError:
            return 0, [_error("input_file_not_found", "The input file has been deleted.")]
        with file:
            for item in islice(read_lines(file), MAX_LINES + 1):
                total += 1
                fault = self._fault_of(item)
                if fault is not None and len(errors) < MAX_ERRORS:
                    errors.append(fault)
        if total > MAX_LINES:
            errors.append(_error("too_many_lines", f"A batch has at most {MAX_LINES} requests."))
        if not total:
            errors.append(_error("empty_file", "The input file has no requests."))
        return total, errors

    def _fault_of(self, item: BatchRequest | BatchFault) -> dict[str, Any] | None:
        if isinstance(item, BatchFault):
            return _error(item.code, item.message, item.line)
        if item.url != self._batch["endpoint"]:
            return _error("mismatched_endpoint", "The url is not the endpoint of the batch.", item.line)
        return None

    async def _answer_all(self) -> None:
        output = await self._store.run(lambda: BatchOutput.open(str(self._work_path)))
        file = await self._store.run(self._open_input)
        try:
            items = await self._store.run(lambda: _remaining(file, output))
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                workers = [
                    group.create_task(self._work(items, output)) for _ in range(self._store.config.max_concurrency)
                ]
                await asyncio.gather(*workers)
                watch.cancel()
        except ExceptionGroup as errors:  # no `except*`: early versions of Python 3.11 wrap what it raises
            failed = errors.subgroup(BatchError)
            if failed is not None:
                raise BatchError(str(failed.exceptions[0])) from errors
            if errors.subgroup(HTTPError) is not None:
                raise HTTPError(storage_unavailable()) from errors
            raise
        finally:
            file.close()
            output.close()

    async def _work(self, items: Iterator[BatchRequest], output: BatchOutput) -> None:
        while not self._ends_as:
            item = await self._store.run(lambda: next(items, None))
            if item is None:
                return
            answer = await self._send(item)
            if answer is None:
                return
            await self._store.run(partial(output.append, answer.encode(item)))

    async def _send(self, request: BatchRequest) -> BatchAnswer | None:
        """The answer; None where the batch ends before it. A request waits while others are queued."""
        while not self._ends_as:
            if self._is_busy():
                await asyncio.sleep(BUSY_S)
                continue
            try:
                answer = await self._transport.send(request)
            except TransportError:
                await asyncio.sleep(RETRY_S)
                continue
            if answer.status not in RETRIED_STATUSES:
                self._counts["completed" if answer.status == 200 else "failed"] += 1
                return answer
            await asyncio.sleep(RETRY_S)
        return None

    async def _watch(self) -> None:
        """Writes the counts down, and ends the batch when it is cancelled or its time is over."""
        while not self._ends_as:
            await asyncio.sleep(POLL_S)
            if time.time() >= self._batch["expires_at"]:
                self._ends_as = "expired"
            elif not await self._change({"request_counts": self._counts}, statuses=("in_progress",)):
                self._ends_as = "cancelled"

    async def _finish(self) -> None:
        status = "cancelled" if self._batch["status"] == "cancelling" else self._ends_as or "completed"
        if status == "completed" and not await self._change(
            {"status": "finalizing", "finalizing_at": int(time.time())}, statuses=("in_progress", "finalizing")
        ):
            status = "cancelled"
        changes = await self._store.run(lambda: self._collect(status))
        await self._change({"status": status, f"{status}_at": int(time.time()), **changes}, ended=True)
        await self._store.run(lambda: self._work_path.unlink(missing_ok=True))

    def _collect(self, status: str) -> dict[str, Any]:
        """Puts answers and errors into a file each; returns what the batch says of them."""
        counts = {"total": self._counts["total"], "completed": 0, "failed": 0}
        paths: dict[str, tuple[Path, BinaryIO]] = {
            kind: self._store.open_upload() for kind in ("output_file_id", "error_file_id")
        }
        changes: dict[str, Any] = {"request_counts": counts}
        try:
            for line, is_ok in self._answers(status):
                counts["completed" if is_ok else "failed"] += 1
                paths["output_file_id" if is_ok else "error_file_id"][1].write(line)
            for kind, (path, file) in paths.items():
                file.close()
                if path.stat().st_size:
                    changes[kind] = self._keep(path, kind)
        finally:
            for path, file in paths.values():
                file.close()
                path.unlink(missing_ok=True)
        return changes

    def _keep(self, path: Path, kind: str) -> str:
        lifetime = self._batch.get("output_expires_after")
        name = f"{self._batch['id']}_{kind.removesuffix('_file_id')}.jsonl"
        seconds = None if lifetime is None else lifetime["seconds"]
        return self._store.keep(path, self._owner, name, ANSWER_PURPOSE, seconds).id

    def _answers(self, status: str) -> Iterator[tuple[bytes, bool]]:
        """Lines of the result, and whether each is an answer; those that were not sent in time are errors."""
        answered = set()
        if self._work_path.is_file():
            with self._work_path.open("rb") as file:
                for line in file:
                    fields = json.loads(line)
                    answered.add(fields["custom_id"])
                    yield line, fields["response"]["status_code"] == 200
        if status == "expired":
            with self._open_input() as file:
                for item in read_lines(file):
                    if isinstance(item, BatchRequest) and item.custom_id not in answered:
                        message = "This request could not be executed before the completion window expired."
                        yield BatchFault(item.line, item.custom_id, "batch_expired", message).encode(), False

    def _open_input(self) -> BinaryIO:
        return self._store.path(self._batch["input_file_id"]).open("rb")

    async def _change(self, changes: dict[str, Any], *, statuses: tuple[str, ...] = (), ended: bool = False) -> bool:
        """Changes the batch unless its status is another one meanwhile; says whether it was changed."""
        batch_id = self._batch["id"]
        changed = await self._store.run(
            lambda: self._store.table.change_batch(batch_id, changes, statuses=statuses, ended=ended)
        )
        if changed is None:
            self._batch["status"] = "cancelling"
            return False
        self._batch = changed
        return True


def _remaining(file: BinaryIO, output: BatchOutput) -> Iterator[BatchRequest]:
    """The requests without an answer."""
    requests = (item for item in read_lines(file) if isinstance(item, BatchRequest))
    rest = (item for item in requests if not output.answered.covers(item))
    first = next(rest, None)  # skips those that are answered here, not between two answers
    return iter(()) if first is None else chain([first], rest)


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
