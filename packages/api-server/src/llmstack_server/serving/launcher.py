"""The start of an engine: its model, its arguments and its processes."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmstack_server.options.config import ServeConfig, chosen_model, is_demo_name
from llmstack_server.options.errors import ServeError
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import RelayedMembers
    from llmstack_llm import AsyncLLM, EngineArgs, StatLogger

logger = logging.getLogger(__name__)

BACKLOG = 2048
_DEMO_PACKAGE = "llmstack_demo_model"


class StageTimer:
    """Seconds of each stage of the start, in order."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stage_to_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the body of the `with` statement as the stage `name`."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.stage_to_s[name] = time.monotonic() - began_s

    @property
    def total_s(self) -> float:
        """Seconds since the timer was made."""
        return time.monotonic() - self.started_s


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


def model_of(name: str | None) -> str:
    """The argument for `resolve_model`, from a model as `llmstack serve` names it, or from none.

    Raises:
        ServeError: There is none.
    """
    name = chosen_model()[0] if name is None else name
    return demo_model_path() if is_demo_name(name) else name


def resolve_engine_args(config: ServeConfig) -> EngineArgs:
    """The engine's arguments with the model found: a folder, the hub's cache, or the hub.

    Raises:
        ServeError: The model cannot be found; the text is one line.
    """
    from llmstack_model_files import ModelFilesError, resolve_model

    model = config.model if config.model is not None else demo_model_path()
    try:
        engine = config.engine
        model_path = str(resolve_model(model, engine.revision, engine.mmproj, engine.file_form))
    except (LLMStackError, ModelFilesError) as error:
        raise ServeError(one_line(error), exit_code=2) from error
    return dataclasses.replace(config.engine, model=model_path)


def start_engine(
    arguments: EngineArgs,
    stat_loggers: Sequence[StatLogger],
    *,
    multiprocess: bool = True,
    addresses: Sequence[str] = (),
    client_index: int = 0,
    members: RelayedMembers | None = None,
) -> AsyncLLM:
    """Starts the engine cores, or attaches to those at `addresses`, and returns without waiting for them.

    `multiprocess`: Whether an engine core runs in its own process rather than in a thread of this one.
    `client_index`: The index of this process among those of its server.
    `members`: Other machines with engine cores, of which the process that started this one is notified.

    Raises:
        ServeError: It cannot be started, or an argument contradicts the model.
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
            members=members,
        )
    except (LLMStackError, ModelFilesError, OSError) as error:
        raise start_error(error) from error


def check_model(config: ServeConfig) -> None:
    """Checks the files of a model that is a local folder, without downloading or starting anything.

    Raises:
        ServeError: The model is missing or cannot run on this machine; the text has a line for each reason.
    """
    from llmstack_llm.model.preflight import check_model_runs
    from llmstack_model_files import ModelFilesError

    try:
        _, engine_config = resolve_engine_args(config).create_engine_config()
        check_model_runs(engine_config)
    except (LLMStackError, ModelFilesError, OSError) as error:
        raise start_error(error) from error


def start_error(error: Exception) -> ServeError:
    """The error that ends a start; options and models that cannot work are errors of usage, with a line for each."""
    from llmstack_llm.model.config import ModelConfigError
    from llmstack_llm.options.problem import OptionsError
    from llmstack_model_files import ModelFilesError

    if isinstance(error, (OptionsError, ModelConfigError, ModelFilesError)):
        return ServeError(str(error), exit_code=2)
    return ServeError(one_line(error))


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
