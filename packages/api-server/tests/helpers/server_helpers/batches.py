"""A server over a folder, with its files and batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state

SECRET = b"s" * 32
URL = "/v1/chat/completions"


class Running:
    """One server over a folder."""

    def __init__(self, app: Any, state: Any) -> None:
        self.app, self.state = app, state

    async def call(self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str) -> Any:
        given = dict(headers) | ({"authorization": f"Bearer {key}"} if key else {})
        return await call(self.app, method, path, body, headers=given)

    async def upload(self, content: bytes, key: str | None = None, **fields: str) -> Any:
        body, media_type = form(content, {"purpose": "batch", **fields})
        return await self.call("POST", "/v1/files", body, key, **{"content-type": media_type})

    async def begin(self, lines: list[Any], key: str | None = None, **fields: Any) -> Any:
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = (await self.upload(content, key)).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **fields}
        return (await self.call("POST", "/v1/batches", body, key)).json()

    async def ended(self, batch_id: str, key: str | None = None) -> Any:
        while True:
            batch = (await self.call("GET", f"/v1/batches/{batch_id}", key=key)).json()
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.005)

    async def lines(self, file_id: str, key: str | None = None) -> list[Any]:
        content = await self.call("GET", f"/v1/files/{file_id}/content", key=key)
        return [json.loads(line) for line in content.body.decode().splitlines()]


def form(content: bytes, fields: dict[str, str]) -> tuple[bytes, str]:
    parts = [
        f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()
    ]
    head = '--edge\r\nContent-Disposition: form-data; name="file"; filename="../in.jsonl"\r\n\r\n'
    return "".join(parts).encode() + head.encode() + content + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge"


def line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return {
        "custom_id": f"r{number}", "method": "POST", "url": URL, "body": {"messages": messages, "max_tokens": 4} | body,
    }  # fmt: skip


@asynccontextmanager
async def server(
    folder: Path, keys: tuple[str, ...] = (), *, step_delay_s: float = 0.0, begins: bool = True, **options: Any
) -> AsyncIterator[Running]:
    folder.mkdir(mode=0o700, exist_ok=True)  # noqa: ASYNC240 (a test)
    config = HTTPConfig(state_dir=str(folder), api_keys=tuple(map(Secret, keys)), **options)
    state = ready_state(FakeEngineClient(step_delay_s=step_delay_s), config)
    state.config = replace(state.config, deployment_secret=SECRET)
    app = build_app(state)
    for begin in state.at_ready if begins else ():
        begin()
    try:
        yield Running(app, state)
    finally:
        for end in state.at_end:
            await end()
