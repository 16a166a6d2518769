"""HTTP client for one streamed request, with the times of its answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from llmstack_bench.errors import BenchError
from llmstack_bench.result import RequestResult
from llmstack_bench.stream import EventLines, StreamError, StreamRecorder
from llmstack_bench.workload import BenchRequest

MAX_ERROR_TEXT = 200


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Fields that all requests of a run share, the prompt apart.

    Attributes:
        endpoint: Path of the route; one that ends with `chat/completions` gets messages in place of a prompt.
        extra_body: Further fields, which override all others.
        timeout_s: A request that takes longer counts as failed.
        request_id_prefix: Begins the `x-request-id` of every request; without one none is sent.
        accepts_any_certificate: TLS without a check of the server.
    """

    endpoint: str = "/v1/completions"
    temperature: float | None = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    request_id_prefix: str | None = None
    accepts_any_certificate: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the route takes messages."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def encode(self, request: BenchRequest, model: str) -> bytes:
        """The body of one request, as JSON."""
        body: dict[str, Any] = {"model": model, "max_tokens": request.num_output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        body |= _prompt_field(request.prompt, is_chat=self.is_chat)
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | dict(self.extra_body)).encode()


class CompletionClient:
    """Streams from one server. An asynchronous context manager that owns the connections."""

    def __init__(self, base_url: str, options: RequestOptions) -> None:
        self.base_url = base_url.rstrip("/")
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._numbers = itertools.count()

    async def __aenter__(self) -> CompletionClient:
        self._session = self._new_session()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def reconnect(self) -> None:
        """Closes the idle connections; requests in flight fail."""
        await self._opened().close()
        self._session = self._new_session()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # The load decides how many connections there are; the requests carry their own time limit.
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=60, ssl=not self._options.accepts_any_certificate
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json", **self._options.headers},
            read_bufsize=1 << 20,
            auto_decompress=False,
        )

    async def send(
        self,
        body: bytes,
        run_started_s: float = 0.0,
        planned_s: float | None = None,
        *,
        keeps_text: bool = False,
        max_chunks: int | None = None,
    ) -> RequestResult:
        """Sends a body of `RequestOptions.encode`; a failure is part of the result, never raised.

        `run_started_s`: `time.perf_counter()` at the start of the run; results count from there.
        `planned_s`: The planned send time, in seconds since `run_started_s`.
        `keeps_text`: Whether the result has the text of the answer.
        `max_chunks`: Closes the connection after so many chunks with tokens, as a client does that cancels.
        """
        sent_s = time.perf_counter()
        start_s = sent_s - run_started_s
        result = RequestResult(start_s=start_s, lag_s=0.0 if planned_s is None else max(0.0, start_s - planned_s))
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._stream(body, result, StreamRecorder(result, sent_s, keeps_text=keeps_text), max_chunks)
        except (aiohttp.ClientError, StreamError, OSError) as error:
            result.e2e_s = time.perf_counter() - sent_s
            result.error = self._reason(error)
        return result

    async def models(self) -> list[dict[str, Any]]:
        """The models that `/v1/models` lists.

        Raises:
            BenchError: The server cannot be reached, or sends no list.
        """
        url = f"{self.base_url}/v1/models"
        try:
            async with asyncio.timeout(10), self._opened().get(url) as response:
                response.raise_for_status()
                listed = json.loads(await response.read())["data"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{url} returns no list of models: {_describe(error)}") from error
        return [model for model in listed if isinstance(model, dict)]

    async def profile(self, action: str) -> None:
        """Begins or ends a profile: `action` is `start_profile` or `stop_profile`.

        Raises:
            BenchError: The server cannot be reached, or has no profiler.
        """
        url = f"{self.base_url}/{action}"
        try:
            async with asyncio.timeout(self._options.timeout_s), self._opened().post(url, data=b"") as response:
                if response.status != 200:
                    reason = _message(await response.content.read(1 << 16))
                    raise BenchError(f"--profile: {url} answers HTTP {response.status}: {reason}")
        except (aiohttp.ClientError, OSError) as error:
            raise BenchError(f"--profile: {url}: {_describe(error)}") from error

    async def _stream(
        self, body: bytes, result: RequestResult, recorder: StreamRecorder, max_chunks: int | None
    ) -> None:
        lines = EventLines()
        prefix = self._options.request_id_prefix
        headers = None if prefix is None else {"x-request-id": f"{prefix}{next(self._numbers)}"}
        url = self.base_url + self._options.endpoint
        async with self._opened().post(url, data=body, headers=headers) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {_message(await response.content.read(1 << 16))}")
            result.predicted_ttft_s = _predicted_s(response.headers.get("x-llmstack-predicted-ttft-ms"))
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                for payload in lines.feed(data):
                    recorder.take(payload, now_s)
                if max_chunks is not None and result.num_chunks >= max_chunks:
                    result.num_output_tokens = max(result.num_output_tokens, result.num_chunks)
                    response.close()
                    return
        recorder.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise BenchError("the client is used outside its context")
        return self._session

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._options.timeout_s:g} s"
        return str(error) if isinstance(error, StreamError) else f"connection: {_describe(error)}"


def _predicted_s(header: str | None) -> float | None:
    try:
        return None if header is None else float(header) / 1000
    except ValueError:
        return None


def _prompt_field(prompt: str | list[int] | list[Mapping[str, Any]], *, is_chat: bool) -> dict[str, Any]:
    is_conversation = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    if is_chat:
        if isinstance(prompt, list) and not is_conversation:
            raise BenchError("--endpoint: a chat route takes text, not token ids", exit_code=2)
        return {"messages": prompt if is_conversation else [{"role": "user", "content": prompt}]}
    if is_conversation:
        raise BenchError("--endpoint: conversations need a route of chat/completions", exit_code=2)
    return {"prompt": prompt}


def _message(body: bytes) -> str:
    """The error message in a response body, shortened."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:MAX_ERROR_TEXT]


def _describe(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_ERROR_TEXT]
