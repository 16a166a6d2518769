"""The run of one batch beside live traffic, from its check to its files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from llmstack_server.apis.batches.errors import BatchError, BatchLostError
from llmstack_server.apis.batches.lines import (
    BatchAnswer,
    BatchFault,
    BatchRequest,
    digest_of,
    line_steps,
    read_lines,
)
from llmstack_server.apis.batches.objects import error_list
from llmstack_server.apis.batches.output import BatchOutput
from llmstack_server.apis.batches.sender import Sender
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.web.errors import HTTPError
from llmstack_types.json_values import JSONObject

MAX_LINES = 50_000
MAX_ERRORS = 100
RETRY_S = 2.0
POLL_S = 1.0
ANSWER_PURPOSE = "batch_output"
Value = TypeVar("Value")


class BatchRun:
    """One batch, from the state that an earlier run left it in."""

    def __init__(self, store: FileStore, owner: str, batch: JSONObject, sender: Sender) -> None:
        self._store = store
        self._owner = owner
        self._batch = batch
        self._sender = sender
        self._work_path = store.path(f"{batch['id']}.work")
        self._counts = dict(batch["request_counts"])
        self._next_item = asyncio.Lock()
        self._ends_as = ""
        self._errors: list[dict[str, object]] = []

    async def run(self) -> None:
        """Runs the batch to its end.

        Raises:
            HTTPError: The folder cannot be used; a later run goes on.
            BatchError: The engine core has ended; a later run goes on.
            BatchLostError: There is no such batch any more.
        """
        if self._batch["status"] == "validating" and not await self._validate():
            return
        if self._batch["status"] == "in_progress":
            await self._answer_all()
        await self._finish()

    async def _work_on(self, steps: Generator[object, None, Value]) -> Value:
        return await self._store.work(self._batch["id"], steps)

    async def _validate(self) -> bool:
        """Checks the form of the whole input, so that a batch with a wrong line costs nothing."""
        total, errors = await self._work_on(self._survey())
        now = int(time.time())
        if errors:
            changes = {"status": "failed", "failed_at": now, "errors": error_list(errors)}
            if not await self._change(changes, statuses=("validating",), ended=True):
                await self._finish()
            return False
        self._counts["total"] = total
        changes = {"status": "in_progress", "in_progress_at": now, "request_counts": self._counts}
        await self._change(changes, statuses=("validating",))
        return True

    def _survey(self) -> Generator[object, None, tuple[int, list[dict[str, object]]]]:
        total = 0
        errors: list[dict[str, object]] = []
        file = self._open_input()
        if file is None:
            return 0, [INPUT_DELETED]
        with file:
            for item in self._steps(file):
                yield None
                total += item is not None
                fault = None if item is None else self._fault_of(item)
                if fault is not None and len(errors) < MAX_ERRORS:
                    errors.append(fault)
                if total > MAX_LINES:
                    errors.append(_error("too_many_lines", f"A batch has at most {MAX_LINES} requests."))
                    break
        if not total:
            errors.append(_error("empty_file", "The input file has no requests."))
        return total, errors

    def _fault_of(self, item: BatchRequest | BatchFault) -> dict[str, object] | None:
        if isinstance(item, BatchFault):
            return _error(item.code, item.message, item.line)
        if item.url != self._batch["endpoint"]:
            return _error("mismatched_endpoint", "The url is not the endpoint of the batch.", item.line)
        return None

    async def _answer_all(self) -> None:
        output = await self._work_on(BatchOutput.open_in_steps(str(self._work_path)))
        file = None
        try:
            num_bytes = (await self._store.run(self._work_path.stat)).st_size
            await self._store.run(lambda: self._store.table.set_work_bytes(self._batch["id"], num_bytes))
            file = await self._store.run(self._open_input)
            if file is None:
                self._end_as("failed", INPUT_DELETED)
                return
            await self._answer(self._remaining(file, output), output)
        finally:
            output.close()
            if file is not None:
                file.close()

    async def _answer(self, items: Iterator[BatchRequest | None], output: BatchOutput) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                workers = [
                    group.create_task(self._work(items, output)) for _ in range(self._store.config.max_concurrency)
                ]
                await asyncio.gather(*workers)
                watch.cancel()
        except ExceptionGroup as errors:  # no `except*`: early versions of Python 3.11 wrap what it raises
            for kind in (BatchLostError, BatchError, HTTPError):
                if (failed := errors.subgroup(kind)) is not None:
                    raise failed.exceptions[0] from errors
            raise

    async def _work(self, items: Iterator[BatchRequest | None], output: BatchOutput) -> None:
        item: BatchRequest | None = None
        while not self._ends_as:
            async with self._sender.places.place(self._owner) as place:
                await self._sender.wait_for_turn(self._has_ended)
                item = item or await self._read_next(items)
                if item is None or self._ends_as:
                    return
                answer = await self._sender.send(item, place)
            if answer is None:
                await asyncio.sleep(RETRY_S)  # without a place, which others can use
            else:
                await self._keep_answer(answer, item, output)
                item = None

    async def _read_next(self, items: Iterator[BatchRequest | None]) -> BatchRequest | None:
        async with self._next_item:  # one worker reads, the others wait for it
            return None if self._ends_as else await self._work_on(_next_of(items))

    async def _keep_answer(self, answer: BatchAnswer, item: BatchRequest, output: BatchOutput) -> None:
        line = answer.encode(item)
        if await self._store.run(partial(self._append, line, output)):
            self._counts["completed" if answer.status == 200 else "failed"] += 1
        else:
            self._end_as(
                "failed", _error("file_quota_exceeded", "The files of the API key have no room for an answer.")
            )

    def _append(self, line: bytes, output: BatchOutput) -> bool:
        """Writes an answer; False where the owner's share has no room for it."""
        maximum, table = self._store.config.max_storage_bytes, self._store.table
        if not table.add_work_bytes(self._batch["id"], self._owner, len(line), maximum):
            return False
        output.append(line)
        return True

    def _end_as(self, status: str, *errors: dict[str, object]) -> None:
        """Ends the batch with the answers that it has; the first cause counts."""
        if not self._ends_as:
            self._ends_as, self._errors = status, list(errors)

    def _has_ended(self) -> bool:
        return bool(self._ends_as)

    async def _watch(self) -> None:
        """Writes the counts down, and ends the batch when it is cancelled or its time is over."""
        while not self._ends_as:
            await asyncio.sleep(POLL_S)
            if time.time() >= self._batch["expires_at"]:
                self._end_as("expired")
            elif not await self._change({"request_counts": self._counts}, statuses=("in_progress",)):
                self._end_as("cancelled")

    async def _finish(self) -> None:
        status = "cancelled" if self._batch["status"] == "cancelling" else self._ends_as or "completed"
        if status == "completed" and not await self._change(
            {"status": "finalizing", "finalizing_at": int(time.time())}, statuses=("in_progress", "finalizing")
        ):
            status = "cancelled"
        changes = await self._work_on(self._collect(status))
        if self._errors:
            changes["errors"] = error_list(self._errors)
        await self._change({"status": status, f"{status}_at": int(time.time()), **changes}, ended=True)
        await self._store.run(lambda: self._work_path.unlink(missing_ok=True))

    def _collect(self, status: str) -> Generator[object, None, dict[str, object]]:
        """Puts answers and errors into a file each; returns what the batch says of them."""
        counts = {"total": self._counts["total"], "completed": 0, "failed": 0}
        paths: dict[str, tuple[Path, BinaryIO]] = {
            kind: self._store.open_upload() for kind in ("output_file_id", "error_file_id")
        }
        changes: dict[str, object] = {"request_counts": counts}
        try:
            for line, is_ok in self._answers(status):
                yield None
                counts["completed" if is_ok else "failed"] += 1
                paths["output_file_id" if is_ok else "error_file_id"][1].write(line)
            for kind, (path, file) in paths.items():
                file.close()
                if path.stat().st_size:
                    changes[kind] = self._keep(path, kind)
        finally:
            for path, file in paths.values():
                with suppress(OSError):  # on a full disk the write has said so
                    file.close()
                path.unlink(missing_ok=True)
        return changes

    def _keep(self, path: Path, kind: str) -> str:
        lifetime = self._batch.get("output_expires_after")
        name = f"{self._batch['id']}_{kind.removesuffix('_file_id')}.jsonl"
        seconds = None if lifetime is None else lifetime["seconds"]
        return self._store.keep(path, self._owner, name, ANSWER_PURPOSE, seconds, is_counted=True).id

    def _answers(self, status: str) -> Iterator[tuple[bytes, bool]]:
        """Lines of the result, and whether each is an answer; those that were not sent in time are errors."""
        answered = set()
        if self._work_path.is_file():
            with self._work_path.open("rb") as work:
                for line in work:
                    fields = json.loads(line)
                    answered.add(digest_of(fields["custom_id"]))
                    yield line, fields["response"]["status_code"] == 200
        file = self._open_input() if status == "expired" else None
        if file is not None:
            with file:
                for item in read_lines(file, self._sender.max_body_bytes):
                    if isinstance(item, BatchRequest) and digest_of(item.custom_id) not in answered:
                        message = "This request could not be executed before the completion window expired."
                        yield BatchFault(item.line, item.custom_id, "batch_expired", message).encode(), False

    def _open_input(self) -> BinaryIO | None:
        """The input; None where the client has deleted it."""
        try:
            return self._store.path(self._batch["input_file_id"]).open("rb")
        except FileNotFoundError:
            if self._store.folder.is_dir():
                return None
            raise

    def _steps(self, file: BinaryIO) -> Iterator[BatchRequest | BatchFault | None]:
        return line_steps(file, self._sender.max_body_bytes)

    def _remaining(self, file: BinaryIO, output: BatchOutput) -> Iterator[BatchRequest | None]:
        """The requests without an answer; None after other steps."""
        for item in self._steps(file):
            is_sent = isinstance(item, BatchRequest) and not output.answered.covers(item)
            yield item if is_sent and isinstance(item, BatchRequest) else None

    async def _change(self, changes: JSONObject, *, statuses: tuple[str, ...] = (), ended: bool = False) -> bool:
        """Changes the batch unless its status is another one meanwhile; says whether it was changed."""
        batch_id = self._batch["id"]
        changed = await self._store.run(
            lambda: self._store.table.change_batch(batch_id, changes, statuses=statuses, ended=ended)
        )
        if changed is None:
            if not await self._store.run(lambda: self._store.table.has_batch(batch_id)):
                raise BatchLostError(batch_id)
            self._batch["status"] = "cancelling"
            return False
        self._batch = changed
        return True


def _next_of(items: Iterator[BatchRequest | None]) -> Generator[None, None, BatchRequest | None]:
    """The next request; None after the last one."""
    for item in items:
        if item is not None:
            return item
        yield
    return None


def _error(code: str, message: str, line: int | None = None) -> dict[str, object]:
    return {"code": code, "message": message, "param": None, "line": line}


INPUT_DELETED = _error("input_file_not_found", "The input file has been deleted.")
