"""The transcripts of some files, from options to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from tqdm import tqdm

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchRequest
from llmstack_server.apis.batches.transport import Transport, TransportError
from llmstack_server.commands.batch.run import own_engine, stopping_signals
from llmstack_server.commands.batch.transports import HttpTransport
from llmstack_server.commands.transcribe.flags import TranscribeOptions
from llmstack_server.options.config import ServeConfig

_SUFFIXES: Final = {"text": ".txt", "srt": ".srt", "vtt": ".vtt"}
_MAX_AT_ONCE: Final = 4
_LIST_TIMEOUT_S: Final = 30.0


def run_transcribe(files: Sequence[str], asked: TranscribeOptions, config: ServeConfig | None) -> int:
    """Transcribes files, several at once; 1 where one of them has no transcript, 130 after Ctrl-C.

    `config`: The options of the model that runs in this command; None asks the server at `asked.url`.

    Raises:
        BatchError: The server or the folder cannot be used.
        ServeError: The model cannot be run.
    """
    if asked.output_dir is not None:
        try:
            Path(asked.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BatchError(f"--output-dir: {asked.output_dir}: {error.strerror}", exit_code=2) from None
    stopped_by: list[int] = []
    try:
        return asyncio.run(_run(files, asked, config, stopped_by))
    except asyncio.CancelledError:
        return 128 + (stopped_by[0] if stopped_by else signal.SIGINT)


async def _run(
    files: Sequence[str], asked: TranscribeOptions, config: ServeConfig | None, stopped_by: list[int]
) -> int:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stopping_signals(stopped_by))
        transport, model = await stack.enter_async_context(_transport(asked, config))
        bar = stack.enter_context(tqdm(total=len(files), unit=" files", disable=None, dynamic_ncols=True))
        places = asyncio.Semaphore(_MAX_AT_ONCE)

        async def transcribe(file: str) -> str | None:
            async with places:
                text = await _transcript(file, asked, transport, model)
            bar.update()
            return text

        tasks = [asyncio.create_task(transcribe(file)) for file in files]
        num_failed = 0
        try:
            for file, task in zip(files, tasks, strict=True):  # printed in the order of the line
                text = await task
                num_failed += text is None
                if text is not None:
                    _write(file, text, asked)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return 1 if num_failed else 0


@contextlib.asynccontextmanager
async def _transport(asked: TranscribeOptions, config: ServeConfig | None) -> AsyncIterator[tuple[Transport, str]]:
    """The transport of requests, and the name of the model that they ask for."""
    if config is not None:
        async with own_engine(config) as own:
            yield own, config.served_model_names[0]
        return
    url = (asked.url or "").rstrip("/").removesuffix("/v1")
    transport = HttpTransport(url, asked.api_key, _MAX_AT_ONCE)
    try:
        if asked.model_name is None:
            yield transport, await asyncio.to_thread(_first_model, url, asked.api_key)
        else:
            yield transport, asked.model_name
    finally:
        transport.close()


def _first_model(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)  # noqa: S310 (the transport has checked it)
    try:
        with urllib.request.urlopen(request, timeout=_LIST_TIMEOUT_S) as answer:  # noqa: S310 (as above)
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise BatchError(f"--url: {url} lists no models: {error}") from error


async def _transcript(file: str, asked: TranscribeOptions, transport: Transport, model: str) -> str | None:
    """The transcript in the format that is asked for; None where there is none, for which standard error has a line."""
    try:
        content = await asyncio.to_thread(Path(file).read_bytes)
        answer = await transport.send(_request(file, content, asked, model))
    except (OSError, TransportError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if answer.status == 200 and isinstance(answer.body, str):
            return answer.body
        found = answer.body.get("error") if isinstance(answer.body, dict) else None
        reason = str(found.get("message")) if isinstance(found, dict) else f"status {answer.status}"
    tqdm.write(f"llmstack transcribe: error: {file}: {reason}", file=sys.stderr)
    return None


def _request(file: str, content: bytes, asked: TranscribeOptions, model: str) -> BatchRequest:
    fields = {"model": model, "response_format": asked.format, "language": asked.language, "prompt": asked.prompt}
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
        if value is not None
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="sound"\r\n\r\n'.encode()
    body = b"".join([*parts, head, content, f"\r\n--{boundary}--\r\n".encode()])
    path = f"/v1/audio/{'translations' if asked.translates else 'transcriptions'}"
    return BatchRequest(1, file, path, body, f"multipart/form-data; boundary={boundary}")


def _write(file: str, text: str, asked: TranscribeOptions) -> None:
    """Writes a transcript into its file, or prints it."""
    if asked.output_dir is None:
        tqdm.write(text, end="")
        return
    path = Path(asked.output_dir) / f"{Path(file).stem}{_SUFFIXES[asked.format]}"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BatchError(f"--output-dir: {path}: {error.strerror}") from error
