"""Runs one batch from its flags to its last line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

from tqdm import tqdm

from llmstack_server.batch.errors import BatchError
from llmstack_server.batch.flags import check_flags_for_url, serve_namespace
from llmstack_server.batch.lines import BatchRequest, read_lines
from llmstack_server.batch.output import Answered, BatchOutput, check_paths
from llmstack_server.batch.runner import BatchRunner, Counts
from llmstack_server.batch.transports import AppTransport, HttpTransport, Transport, UnneededTransport
from llmstack_server.chat.parsers import parsers_for
from llmstack_server.config import ServeConfig, config_from
from llmstack_server.daemon_thread import in_daemon_thread
from llmstack_server.environment import Environment, read_environment
from llmstack_server.http.app import build_app
from llmstack_server.http.metrics import ServerMetrics
from llmstack_server.launcher import one_line, resolve_engine_args, start_engine
from llmstack_server.lifecycle import LifecycleState
from llmstack_server.logs import set_up_logging
from llmstack_server.state import ServerState
from llmstack_types import LLMStackError

MAX_CONCURRENCY_OVER_HTTP = 512


def run_batch(namespace: argparse.Namespace) -> int:
    """Answers every line of the input; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        BatchError: The flags, the files or the server stand in the way.
        ServeError: The model cannot be run.
    """
    if namespace.url is not None:
        check_flags_for_url(namespace)
    check_paths(namespace.input_file, namespace.output_file)
    with (
        _open_input(namespace.input_file) as file,
        contextlib.closing(BatchOutput.open(namespace.output_file)) as output,
    ):
        stopped_by: list[int] = []
        try:
            counts = asyncio.run(_run(namespace, file, output, stopped_by))
        except asyncio.CancelledError:
            sys.stderr.write("stopped; the same command goes on where it stopped\n")
            return 128 + (stopped_by[0] if stopped_by else signal.SIGINT)
    sys.stderr.write(f"{counts}\n")
    return 0


async def _run(namespace: argparse.Namespace, file: BinaryIO, output: BatchOutput, stopped_by: list[int]) -> Counts:
    num_lines, needs_model = _survey(file, output.answered)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_stopping_signals(stopped_by))
        transport = await stack.enter_async_context(_transport(namespace) if needs_model else _no_transport())
        bar = stack.enter_context(tqdm(total=num_lines, unit=" requests", disable=None, dynamic_ncols=True))
        return await BatchRunner(transport, output, bar.update).run(read_lines(file), namespace.max_concurrency)


@contextlib.contextmanager
def _stopping_signals(stopped_by: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM cancel the calling task, so that the engine is shut down in order."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int) -> None:
        stopped_by.append(number)
        if task is not None:
            task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _transport(namespace: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[Transport]:
    environment = read_environment(os.environ)
    if namespace.url is None:
        only_log_level = Environment(log_level=environment.log_level)
        return _own_engine(config_from(serve_namespace(namespace), only_log_level))
    return _other_server(namespace, environment)


@contextlib.asynccontextmanager
async def _no_transport() -> AsyncIterator[Transport]:
    """For a batch whose requests all have their answers: no model is loaded to find that out."""
    yield UnneededTransport()


@contextlib.asynccontextmanager
async def _other_server(namespace: argparse.Namespace, environment: Environment) -> AsyncIterator[Transport]:
    num_threads = min(namespace.max_concurrency, MAX_CONCURRENCY_OVER_HTTP)
    transport = HttpTransport(namespace.url, namespace.api_key or environment.api_key, num_threads)
    try:
        yield transport
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def _own_engine(config: ServeConfig) -> AsyncIterator[Transport]:
    """The routes of a server over an engine of its own, without a socket."""
    set_up_logging(config.http)
    metrics = ServerMetrics(config.served_model_names[0], has_aliases=False)
    # On a thread that nobody waits for: Ctrl-C must end a download.
    engine = await in_daemon_thread(lambda: start_engine(resolve_engine_args(config), [metrics]), "open-engine")
    try:
        state = ServerState(config, engine, metrics)
        try:
            state.ready = await engine.wait_until_ready()
        except LLMStackError as error:
            raise BatchError(one_line(error)) from error
        state.chat_parsers = parsers_for(config.chat, engine.chat_template)
        for step in (LifecycleState.LOADING_MODEL, LifecycleState.INITIALIZING_ENGINE, LifecycleState.READY):
            state.lifecycle.advance(step)
        yield AppTransport(build_app(state), engine.check_health)
    finally:
        await engine.shutdown()


def _open_input(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchError(f"--input-file: {path}: {error.strerror}", exit_code=2) from None


def _survey(file: BinaryIO, answered: Answered) -> tuple[int | None, bool]:
    """How many lines there are, and whether one of them is to be sent; a pipe is read only once."""
    if not file.seekable():
        return None, True
    start, num_lines, needs_model = file.tell(), 0, False
    for item in read_lines(file):
        num_lines += 1
        needs_model = needs_model or (isinstance(item, BatchRequest) and not answered.covers(item))
    file.seek(start)
    return num_lines, needs_model
