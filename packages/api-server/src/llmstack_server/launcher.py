"""The steps of a start before anything is served: the socket, the model's name, the engine process."""

from __future__ import annotations

import errno
import importlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmstack_server.config import ServeConfig
from llmstack_server.errors import ServeError
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_llm import AsyncLLM, EngineArgs

logger = logging.getLogger(__name__)

BACKLOG = 2048
_DEMO_PACKAGE = "llmstack_demo_model"
_ENGINE_LOG_LEVELS = {"trace": "debug"}


class StageTimer:
    """Seconds of each stage of the start, in order."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stage_to_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures one stage."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.stage_to_s[name] = time.monotonic() - began_s

    @property
    def total_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started_s


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded, so that a port in use costs nobody a minute.

    Listening at once, since two processes can bind one address as long as neither listens.

    Raises:
        ServeError: The address cannot be had; the text names the flag to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_user_timeout(listener)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServeError(_bind_message(error, host, port)) from None
    listener.setblocking(False)
    return listener


def _set_user_timeout(listener: socket.socket) -> None:
    """A reader that takes nothing for a minute loses its connection, and its request its blocks; sockets inherit it."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, 60_000)


def _bind_message(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; choose another one with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is reserved for the administrator; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host} is not an address of this machine; choose another one with --host"
    return f"cannot listen on {host} port {port} (--host, --port): {error.strerror or error}"


def url_of(listener: socket.socket) -> str:
    """The address as a user types it, with the port that was chosen."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def demo_model_path() -> str:
    """The folder of the embedded demo model.

    Raises:
        ServeError: Its package is not installed.
    """
    try:
        return str(importlib.import_module(_DEMO_PACKAGE).model_path())
    except ImportError:
        raise ServeError(
            "no model was named, and the demo model is not installed: pip install llmstack-demo-model"
        ) from None


def resolve_engine_args(config: ServeConfig) -> EngineArgs:
    """The engine's arguments with the model found: a folder, the hub's cache, or the hub.

    Raises:
        ServeError: It cannot be found; one line.
    """
    from llmstack_model_files import ModelFilesError, resolve_model

    model = config.model if config.model is not None else demo_model_path()
    try:
        model_path = str(resolve_model(model, config.engine["revision"]))
    except (LLMStackError, ModelFilesError) as error:
        raise ServeError(one_line(error)) from error
    return engine_args(config, model_path)


def engine_args(config: ServeConfig, model_path: str) -> EngineArgs:
    """The engine's arguments for the model in a folder.

    Raises:
        ServeError: Options contradict each other; one line.
    """
    from llmstack_llm import EngineArgs

    try:
        return EngineArgs(
            model=model_path,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_queued_reqs=config.max_num_queued_reqs,
            trace=config.observability.has_trace_lines,
            log_level=_ENGINE_LOG_LEVELS.get(config.http.log_level, config.http.log_level).upper(),
            **config.engine,
        )
    except LLMStackError as error:
        raise ServeError(one_line(error)) from error


def start_engine(
    arguments: EngineArgs,
    stat_loggers: Sequence[Any],
    *,
    multiprocess: bool = True,
    addresses: Sequence[str] = (),
    client_index: int = 0,
) -> AsyncLLM:
    """Starts the engine cores, or attaches to those at `addresses`, and returns without waiting for them.

    `multiprocess`: Whether an engine core gets a process of its own, or a thread of this one.
    `client_index`: Which of several processes of one server this is.

    Raises:
        ServeError: It cannot even be started, or an argument contradicts the model.
    """
    from llmstack_llm import AsyncLLM
    from llmstack_model_files import ModelFilesError

    try:
        return AsyncLLM.from_engine_args(
            arguments,
            stat_loggers=stat_loggers,
            multiprocess=multiprocess,
            client_addresses=addresses,
            client_index=client_index,
        )
    except (LLMStackError, ModelFilesError, OSError) as error:
        raise ServeError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
