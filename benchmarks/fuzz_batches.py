"""Odd batches against a server in this process: files of valid, damaged and costly lines, by two API keys.

    python benchmarks/fuzz_batches.py --count 2000

Each file begins with valid lines; fields are removed, doubled, exchanged and given values of any type, and some lines
are cut, are no JSON, or cost much to decode. Some batches are cancelled, lose their input, or are left to the next
server. Each must end; one that runs has an answer for each of its lines, as its counts say; nothing is an internal
error; no key has more than its share; no line is left as one that is being read. `make fuzz` runs this.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz_bodies import ODD, RAW, ROUTES
from fuzz_requests import FuzzError, check, mutate, run

from llmstack_server.app.application import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import BatchConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.testing.asgi_client import Answer, call

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
KEYS = ("key of the first", "key of the second")
SHARE_BYTES = 300_000
MAX_BODY_BYTES = 60_000
ENDS = ("completed", "failed", "expired", "cancelled")
# What a server may answer to a line that it has accepted.
FORBIDDEN_STATUSES = (500, 502, 503)
COSTLY = [b"[]," * 30_000 + b"[]", b"[" * 200 + b"]" * 200, b"1e5," * 20_000 + b"1", b'"' + b"x" * 200_000 + b'"']


def draw_line(draw: random.Random, endpoint: str, number: int) -> bytes:
    """One line: mostly a request that is nearly right."""
    body = {name: value for name, value in ROUTES[endpoint].items() if name != "stream"}
    body = mutate(draw, body) if draw.random() < 0.3 else body
    line: dict[str, Any] = {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body}
    return json.dumps(line).encode()


def damage(draw: random.Random, line: bytes) -> bytes:
    """The line with one fault of the envelope, of the text or of its cost."""
    kind = draw.randrange(5)
    if kind == 0:
        return json.dumps(mutate(draw, json.loads(line))).encode()
    if kind == 1:
        return draw.choice(RAW).replace(b"\n", b"")
    if kind == 2:
        return line[: draw.randrange(len(line))] + bytes([draw.randrange(256)]) + line[draw.randrange(len(line)) :]
    if kind == 3:
        return line[:-2] + b',"x":[' + draw.choice(COSTLY) + b"]}}"
    return json.dumps(
        {**json.loads(line), draw.choice(["custom_id", "method", "url", "body"]): draw.choice(ODD)}
    ).encode()


def draw_file(draw: random.Random, endpoint: str) -> bytes:
    """The content of an input file."""
    lines = [draw_line(draw, endpoint, number) for number in range(draw.choice((0, 1, 2, 5, 20)))]
    if lines and draw.random() < 0.4:
        index = draw.randrange(len(lines))
        lines[index] = damage(draw, lines[index])
    if lines and draw.random() < 0.1:
        lines.append(lines[0])
    return draw.choice((b"\n", b"\r\n", b"\n\n")).join(lines) + draw.choice((b"", b"\n"))


class Server:
    """One server over the folder of all."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app = app
        self._folder = folder

    async def call(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> Answer:
        answer = await call(self._app, method, path, body, {"authorization": f"Bearer {key}", **headers})
        check(answer)
        return answer

    async def begin(self, draw: random.Random, key: str) -> str | None:
        """Uploads a file and begins its batch; its id, unless one of both was refused."""
        endpoint = draw.choice(ENDPOINTS)
        content = (
            b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge\r\nContent-Disposition: '
            b'form-data; name="file"; filename="x"\r\n\r\n' + draw_file(draw, endpoint) + b"\r\n--edge--\r\n"
        )
        headers = {"content-type": "multipart/form-data; boundary=edge"}
        uploaded = await self.call("POST", "/v1/files", key, content, **headers)
        if uploaded.status != 200:
            return None
        file_id = uploaded.json()["id"]
        body: Any = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        body = mutate(draw, body) if draw.random() < 0.2 else body
        begun = await self.call("POST", "/v1/batches", key, body)
        if draw.random() < 0.1:
            await self.call("DELETE", f"/v1/files/{file_id}", key)
        if begun.status != 200:
            return None
        batch_id: str = begun.json()["id"]
        if draw.random() < 0.1:
            await self.call("POST", f"/v1/batches/{batch_id}/cancel", key)
        return batch_id

    async def check_end(self, batch_id: str, key: str) -> str:
        """Waits for the end of a batch, and checks its files; its status."""
        async with asyncio.timeout(60):
            path = f"/v1/batches/{batch_id}"
            while (batch := (await self.call("GET", path, key)).json())["status"] not in ENDS:  # noqa: ASYNC110 (HTTP)
                await asyncio.sleep(0.01)
        answers: list[Any] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name]:
                content = await self.call("GET", f"/v1/files/{batch[name]}/content", key)
                answers += [json.loads(line) for line in content.body.splitlines()]
        check_batch(batch, answers)
        return str(batch["status"])

    async def delete_all(self, key: str) -> None:
        """Deletes the files of a key, which are within its share."""
        files = (await self.call("GET", "/v1/files", key)).json()["data"]
        if sum(file["bytes"] for file in files) > SHARE_BYTES:
            raise FuzzError(f"a key has more than its share: {sum(file['bytes'] for file in files)} bytes")
        for file in files:
            await self.call("DELETE", f"/v1/files/{file['id']}", key)

    def check_nothing_left(self) -> None:
        """Checks the folder after all files were deleted."""
        with closing(sqlite3.connect(self._folder / "batches.sqlite3")) as table:
            num_read = table.execute("SELECT count(*) FROM batches WHERE is_read OR attempts").fetchone()[0]
        left = [path.name for path in (self._folder / "files").iterdir()]
        if num_read or left:
            raise FuzzError(f"{num_read} batches are being read, and {left[:5]} are left")


def check_batch(batch: dict[str, Any], answers: list[Any]) -> None:
    """Checks the answers of a batch by its counts.

    Raises:
        FuzzError: They differ, or an answer is one that no line should get.
    """
    counts, ids = batch["request_counts"], [answer["custom_id"] for answer in answers]
    statuses = [(answer["response"] or {}).get("status_code", 200) for answer in answers]
    is_whole = batch["status"] != "completed" or len(answers) == counts["total"]
    if len(set(ids)) != len(ids) or len(ids) != counts["completed"] + counts["failed"] or not is_whole:
        raise FuzzError(f"{len(ids)} answers, {len(set(ids))} of them distinct, in {batch}")
    codes = [error["code"] for error in (batch["errors"] or {"data": []})["data"]]
    if any(status in FORBIDDEN_STATUSES for status in statuses) or "internal_error" in codes:
        raise FuzzError(f"an internal error: {batch} {answers}"[:3000])


@asynccontextmanager
async def opened_server(folder: Path) -> AsyncIterator[Server]:
    engine = FakeEngineClient(num_labels=2)
    engine.script = "Hello, you"
    limits = BatchConfig(max_storage_bytes=SHARE_BYTES, max_file_bytes=SHARE_BYTES, max_concurrency=4)
    config = HTTPConfig(
        state_dir=str(folder), api_keys=tuple(map(Secret, KEYS)), batches=limits, max_body_bytes=MAX_BODY_BYTES,
        uvicorn_log_level="critical",
    )  # fmt: skip
    state = ready_state(engine, config)
    state.config = replace(state.config, deployment_secret=b"s" * 32)
    app = build_app(state)
    for begin in state.at_ready:
        begin()
    try:
        yield Server(app, folder)
    finally:
        for end in state.at_end:
            await end()


async def fuzz_round(draw: random.Random, folder: Path, counts: Counter[str]) -> None:
    """Some batches of both keys at one time; a part of them is left to a second server."""
    begun: list[tuple[str, str]] = []
    async with opened_server(folder) as server:
        for _ in range(draw.randrange(1, 8)):
            key = draw.choice(KEYS)
            batch_id = await server.begin(draw, key)
            begun += [(batch_id, key)] if batch_id is not None else []
        num_here = draw.randrange(len(begun) + 1)
        for batch_id, key in begun[:num_here]:
            counts[await server.check_end(batch_id, key)] += 1
    async with opened_server(folder) as server:
        for batch_id, key in begun[num_here:]:
            counts[await server.check_end(batch_id, key)] += 1
        for key in KEYS:
            await server.delete_all(key)
        server.check_nothing_left()


async def fuzz(count: int, seed: int) -> Counter[str]:
    """Runs at least `count` batches; their counts by status.

    Raises:
        FuzzError: Something is not as it must be; the message has the seed of the round.
    """
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        while counts.total() < count:
            try:
                await fuzz_round(random.Random(seed), Path(folder), counts)
            except Exception as error:
                raise FuzzError(f"batches of seed {seed}: {error!r}") from error
            seed += 1
    return counts


def main(arguments: list[str] | None = None) -> int:
    return run(__doc__, fuzz, "batches", 2000, arguments)


if __name__ == "__main__":
    sys.exit(main())
