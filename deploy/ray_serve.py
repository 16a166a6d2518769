"""Replicas of llmstack that Ray Serve starts and stops with the load.

`serve run deploy.ray_serve:app`, on a machine of a running Ray cluster. `LLMSTACK_SERVE` has the arguments of
`llmstack serve` in each replica.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

START_TIMEOUT_S = LONGEST_PAUSE_S = 600.0
NOT_FORWARDED = {"host", "connection", "transfer-encoding", "content-length"}


@serve.deployment(
    max_ongoing_requests=int(os.environ.get("LLMSTACK_MAX_REQUESTS", "64")),
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": int(os.environ.get("LLMSTACK_MAX_REPLICAS", "4")),
        "target_ongoing_requests": int(os.environ.get("LLMSTACK_TARGET_REQUESTS", "16")),
        "upscale_delay_s": float(os.environ.get("LLMSTACK_UPSCALE_DELAY_S", "30")),
    },
    ray_actor_options={"num_cpus": 1},
)
class Replica:
    """One server, on a unix socket that only this replica uses."""

    def __init__(self, arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="llmstack-")
        uds = str(Path(self._directory.name) / "http.sock")
        command = [sys.executable, "-m", "llmstack_command", "serve", *shlex.split(arguments), "--uds", uds]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=uds), base_url="http://replica", timeout=LONGEST_PAUSE_S
        )
        self._is_ready = asyncio.Event()
        self._waiting = asyncio.get_running_loop().create_task(self._wait_until_ready())

    async def _wait_until_ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._is_ready.is_set():
                await asyncio.sleep(0.1)
                self.check_health()
                try:
                    if (await self._client.get("/ready")).status_code == 200:
                        self._is_ready.set()
                except httpx.TransportError:  # the socket is not there yet
                    continue

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose server has ended."""
        if self._server.poll() is not None:
            raise RuntimeError(f"llmstack serve has ended with status {self._server.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Forwards a request; its answer is passed on as it comes."""
        if not self._is_ready.is_set():
            await asyncio.shield(self._waiting)
        headers = {name: value for name, value in request.headers.items() if name not in NOT_FORWARDED}
        target = httpx.URL(request.url.path, query=request.url.query.encode())
        forwarded = self._client.build_request(request.method, target, headers=headers, content=await request.body())
        answer = await self._client.send(forwarded, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in NOT_FORWARDED}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.terminate()
            server.wait()


app = Replica.bind(os.environ.get("LLMSTACK_SERVE", ""))
