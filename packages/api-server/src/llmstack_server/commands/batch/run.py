"""The run of one batch, from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

from tqdm import tqdm

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchRequest, read_lines
from llmstack_server.apis.batches.output import Answered, BatchOutput, check_paths
from llmstack_server.apis.batches.transport import AppTransport, Transport, UnneededTransport
from llmstack_server.app import build_app
from llmstack_server.app.adapter_routes import load_configured_adapters
from llmstack_server.chat.parsers import parsers_for
from llmstack_server.commands.batch.flags import BatchOptions
from llmstack_server.commands.batch.runner import BatchRunner, Counts
from llmstack_server.commands.batch.transports import HttpTransport
from llmstack_server.observability.logs import set_up_logging
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.event_loop import in_daemon_thread
from llmstack_server.serving.launcher import one_line, resolve_engine_args, start_engine
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_types import LLMStackError

MAX_CONCURRENCY_OVER_HTTP = 512


def run_batch(options: BatchOptions, config: ServeConfig | None) -> int:
    """Answers every line of the input; 130 after Ctrl-C, 143 after SIGTERM.

    `config`: The options of the model that runs in this command; None asks the server at `options.url`.

    Raises:
        BatchError: The files or the server cannot be used.
        ServeError: The model cannot be run.
    """
    check_paths(options.input_file, options.output_file)
    with (
        _open_input(options.input_file) as file,
        contextlib.closing(BatchOutput.open(options.output_file)) as output,
    ):
        stopped_by: list[int] = []
        try:
            counts = asyncio.run(_run(options, config, file, output, stopped_by))
        except asyncio.CancelledError:
            sys.stderr.write("stopped; run the same command again to continue\n")
            return 128 + (stopped_by[0] if stopped_by else signal.SIGINT)
    sys.stderr.write(f"{counts}\n")
    return 0


async def _run(
    options: BatchOptions, config: ServeConfig | None, file: BinaryIO, output: BatchOutput, stopped_by: list[int]
) -> Counts:
    num_lines, needs_model = _survey(file, output.answered)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stopping_signals(stopped_by))
        transport = await stack.enter_async_context(_transport(options, config) if needs_model else _no_transport())
        bar = stack.enter_context(tqdm(total=num_lines, unit=" requests", disable=None, dynamic_ncols=True))
        return await BatchRunner(transport, output, bar.update).run(read_lines(file), options.max_concurrency)


@contextlib.contextmanager
def stopping_signals(stopped_by: list[int]) -> Iterator[None]:
    """Lets SIGINT and SIGTERM cancel the calling task, so that the engine is shut down properly."""
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


def _transport(options: BatchOptions, config: ServeConfig | None) -> contextlib.AbstractAsyncContextManager[Transport]:
    return _other_server(options) if config is None else own_engine(config)


@contextlib.asynccontextmanager
async def _no_transport() -> AsyncIterator[Transport]:
    """A transport for a batch that is complete already, so that no model is loaded for it."""
    yield UnneededTransport()


@contextlib.asynccontextmanager
async def _other_server(options: BatchOptions) -> AsyncIterator[Transport]:
    num_threads = min(options.max_concurrency, MAX_CONCURRENCY_OVER_HTTP)
    transport = HttpTransport(options.url or "", options.api_key, num_threads)
    try:
        yield transport
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def own_engine(config: ServeConfig) -> AsyncIterator[Transport]:
    """The application of a server over its own engine, without a socket."""
    set_up_logging(config.http)
    metrics = ServerMetrics(config.served_model_names[0], has_aliases=False)
    # In a daemon thread, so that Ctrl-C ends a download.
    engine = await in_daemon_thread(lambda: start_engine(resolve_engine_args(config), [metrics]), "open-engine")
    try:
        state = ServerState(config, engine, metrics)
        try:
            state.ready = await engine.wait_until_ready()
            await load_configured_adapters(state)
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
    """The number of lines, if known, and whether one of them must be sent; a pipe is read only once."""
    if not file.seekable():
        return None, True
    start, num_lines, needs_model = file.tell(), 0, False
    for item in read_lines(file):
        num_lines += 1
        needs_model = needs_model or (isinstance(item, BatchRequest) and not answered.covers(item))
    file.seek(start)
    return num_lines, needs_model
