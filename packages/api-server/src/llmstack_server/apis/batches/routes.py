"""Routes of the Files and Batches APIs; they exist with `--state-dir`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastapi import Request
from starlette.responses import FileResponse, JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.apis.batches.objects import BatchRequestBody, check_batch_fields, check_lifetime, new_batch
from llmstack_server.apis.batches.storage import FileStore
from llmstack_server.apis.batches.table import StoredFile
from llmstack_server.apis.batches.upload import Upload, receive_upload
from llmstack_server.apis.batches.worker import BatchWorker
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Batch, BatchPage, Deleted, File, FilePage
from llmstack_server.web.body import read_object
from llmstack_server.web.checks import check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.openapi import ORDER, TEXT, Schema, page_of
from llmstack_server.web.openapi_bodies import EXPIRY, FixedBody, RequestBody, with_required
from llmstack_server.web.routes import Content, Router, RouteSpec
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject

MAX_BATCHES = 1000
MAX_UNFINISHED = 100
PURPOSES = ("batch", "vision", "user_data")
_DOWNLOAD_HEADERS = {"x-content-type-options": "nosniff", "content-security-policy": "default-src 'none'; sandbox"}
_UPLOAD_SCHEMA: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string"},
        "expires_after[seconds]": {"type": "integer"},
    },
}


class BatchBody(RequestBody):
    """The body of a new batch, which names one of the routes that batches may name."""

    def __init__(self, router: Router) -> None:
        super().__init__(BatchRequestBody, fields={"output_expires_after": EXPIRY})
        self._router = router

    def schema(self) -> Schema:
        """The schema, once all routes are declared."""
        endpoint: Schema = {"enum": [*self._router.batch_paths()]}
        window: Schema = {"const": "24h"}
        schema = super().schema()
        return with_required(schema, {"input_file_id": TEXT, "endpoint": endpoint, "completion_window": window})


def add_batch_routes(router: Router, state: ServerState) -> None:
    """Adds the routes, and what runs the batches."""
    if state.config.http.state_dir is None:
        return
    folder, secret = Path(state.config.http.state_dir), state.config.deployment_secret
    store = FileStore(folder, state.config.http.batches, secret)
    state.stored_files = store
    worker = BatchWorker(state, store)
    state.at_ready.append(worker.begin)
    state.at_end.append(worker.stop)
    _add_file_routes(router, state, store)
    _add_batch_routes(router, state, store, worker)


def _add_file_routes(router: Router, state: ServerState, store: FileStore) -> None:
    @router.declare(RouteSpec(
        "POST", "/v1/files", File, tag="Batches", body=FixedBody(_UPLOAD_SCHEMA, "multipart/form-data"),
        id_of_answer=("file_id", "$response.body#/id")
    ))  # fmt: skip
    async def upload(request: Request) -> Response:
        """Stores a file: requests of a batch, or a picture."""
        owner = current_client.get().tenant
        timeout_s = state.config.http.receive_timeout_s
        async with receive_upload(request.headers, request.receive, store, owner, timeout_s) as received:
            lifetime_s = _check_upload(received)
            name, purpose = received.form.filename or "file", received.form.fields["purpose"]
            file = await store.run(lambda: store.keep(received.path, owner, name, purpose, lifetime_s))
        return JSONResponse(file.as_object())

    @router.declare(RouteSpec(
        "GET", "/v1/files", FilePage, tag="Batches",
        query={
            "purpose": (TEXT, "files of this purpose only"), "limit": page_of(10_000, 10_000, "files"),
            "order": ORDER, "after": (TEXT, "the last file of the page before"),
        },
    ))  # fmt: skip
    async def list_files(request: Request) -> Response:
        """Lists the files of the key, the newest first."""
        owner = current_client.get().tenant  # not in the lambda: another thread has no client
        files = await store.run(lambda: store.table.files(owner))
        query, purpose = request.query_params, request.query_params.get("purpose")
        now = int(time.time())
        shown = [
            file.as_object()
            for file in files
            if purpose in (None, file.purpose) and (file.expires_at is None or file.expires_at > now)
        ]
        return JSONResponse(_page(shown, query, max_limit=10_000, default=10_000))

    @router.declare(RouteSpec("GET", "/v1/files/{file_id}", File, tag="Batches"))
    async def retrieve_file(file_id: str) -> Response:
        """Returns the facts of a file, without its content."""
        return JSONResponse((await _file(store, file_id)).as_object())

    @router.declare(RouteSpec("DELETE", "/v1/files/{file_id}", Deleted, tag="Batches"))
    async def delete_file(file_id: str) -> Response:
        """Deletes a file and its content."""
        file = await _file(store, file_id)
        await store.run(lambda: store.delete(file.id))
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    @router.declare(RouteSpec("GET", "/v1/files/{file_id}/content", Content.FILE, tag="Batches"))
    async def file_content(file_id: str) -> Response:
        """Returns the content of a file."""
        file = await _file(store, file_id)
        path, media_type = store.path(file.id), "application/octet-stream"
        return FileResponse(path, media_type=media_type, filename=file.filename, headers=_DOWNLOAD_HEADERS)


def _add_batch_routes(router: Router, state: ServerState, store: FileStore, worker: BatchWorker) -> None:
    body = BatchBody(router)

    @router.declare(RouteSpec(
        "POST", "/v1/batches", Batch, tag="Batches", body=body, id_of_answer=("batch_id", "$response.body#/id")
    ))  # fmt: skip
    async def create_batch(request: Request) -> Response:
        """Begins a batch of the requests in a file."""
        body = await read_object(state, request)
        fields = parse(BatchRequestBody, body)
        check_fields(state, body, fields, {})
        file = await _file(store, check_batch_fields(fields, router.batch_paths()), "input_file_id")
        if file.purpose != "batch":
            raise request_errors.invalid_value("input_file_id", "the purpose of the file is not 'batch'")
        batch, owner = new_batch(fields, file.id), current_client.get().tenant
        await store.run(lambda: _add_batch(store, batch, owner, worker.process))
        worker.notice()
        return JSONResponse(batch)

    @router.declare(RouteSpec(
        "GET", "/v1/batches", BatchPage, tag="Batches",
        query={
            "limit": page_of(20, 100, "batches"), "order": ORDER,
            "after": (TEXT, "the last batch of the page before"),
        },
    ))  # fmt: skip
    async def list_batches(request: Request) -> Response:
        """Lists the batches of the key, the newest first."""
        owner = current_client.get().tenant
        batches = await store.run(lambda: store.table.batches(owner))
        return JSONResponse(_page(batches, request.query_params, max_limit=100, default=20))

    @router.declare(RouteSpec("GET", "/v1/batches/{batch_id}", Batch, tag="Batches"))
    async def retrieve_batch(batch_id: str) -> Response:
        """Returns the state of a batch."""
        return JSONResponse(await _batch(store, batch_id))

    @router.declare(RouteSpec("POST", "/v1/batches/{batch_id}/cancel", Batch, tag="Batches"))
    async def cancel_batch(batch_id: str) -> Response:
        """Ends a batch after the requests that run; one that has ended stays as it is."""
        batch = await _batch(store, batch_id)
        changes = {"status": "cancelling", "cancelling_at": int(time.time())}
        running = ("validating", "in_progress")
        changed = await store.run(lambda: store.table.change_batch(batch["id"], changes, statuses=running))
        worker.notice()
        return JSONResponse(changed or await _batch(store, batch_id))


def _add_batch(store: FileStore, batch: dict[str, object], owner: str, process: int) -> None:
    if not store.table.add_batch(batch, owner, process, MAX_BATCHES, MAX_UNFINISHED):
        message = f"At most {MAX_UNFINISHED} batches of one API key may run or wait; let one end first."
        raise InvalidRequestError(message, code="file_quota_exceeded")


def _check_upload(upload: Upload) -> int | None:
    """The lifetime that the fields of an upload ask for; raises InvalidRequestError."""
    fields = upload.form.fields
    if "purpose" not in fields:
        raise missing_parameter("purpose")
    if fields["purpose"] not in PURPOSES:
        raise request_errors.invalid_value("purpose", f"expected one of {', '.join(PURPOSES)}")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if seconds is not None and not (seconds.isascii() and seconds.isdecimal() and len(seconds) <= 9):
        raise request_errors.invalid_value("expires_after.seconds", "expected a whole number")
    return check_lifetime("expires_after", anchor, None if seconds is None else int(seconds))


async def _file(store: FileStore, file_id: str, param: str | None = None) -> StoredFile:
    owner = current_client.get().tenant
    found = await store.run(lambda: store.table.file(file_id, owner))
    if found is None:
        raise InvalidRequestError("There is no file with this id.", param=param, code="not_found")
    return found


async def _batch(store: FileStore, batch_id: str) -> JSONObject:
    owner = current_client.get().tenant
    found = await store.run(lambda: store.table.batch(batch_id, owner))
    if found is None:
        raise InvalidRequestError("There is no batch with this id.", code="not_found")
    return found


def _page(
    entries: Sequence[dict[str, object]], query: Mapping[str, str], *, max_limit: int, default: int
) -> dict[str, object]:
    """One page of a list, by the query's `limit`, `after` and `order`; raises InvalidRequestError."""
    limit = _limit(query.get("limit", str(default)), max_limit)
    if query.get("order", "desc") not in ("asc", "desc"):
        raise request_errors.invalid_value("order", "expected 'asc' or 'desc'")
    ordered = entries if query.get("order", "desc") == "desc" else entries[::-1]
    start, after = 0, query.get("after")
    if after is not None:
        start = next((index + 1 for index, entry in enumerate(ordered) if entry["id"] == after), -1)
        if start < 0:
            raise InvalidRequestError("There is no entry with this id.", param="after", code="not_found")
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def _limit(text: str, maximum: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise request_errors.invalid_value("limit", "expected a whole number")
    if int(text) > maximum:
        raise request_errors.above_max("limit", maximum, int(text), is_integer=True)
    if int(text) < 1:
        raise request_errors.below_min("limit", 1, int(text), is_integer=True)
    return int(text)
