"""Logging of the process, and the request id in log lines."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_types.log_lines import LogFormatter

# The `x-request-id` of the request that the running task answers.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

OUR_LOGGERS = (
    "llmstack_server", "llmstack_llm", "llmstack_engine_client", "llmstack_engine_core", "llmstack_insight",
    "llmstack_model_files", "llmstack_parallel", "llmstack_step_log",
)  # fmt: skip
_LEVELS = {"trace": logging.DEBUG}


def level_number(name: str) -> int:
    """The number of a log level, by its name in lower case."""
    return _LEVELS.get(name, getattr(logging, name.upper(), logging.INFO))


class _PathFilter:
    """A filter of uvicorn's access lines, whose third argument is the path with its query."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for lines of these paths."""
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in self._paths


def leave_out_paths(paths: str) -> None:
    """Leaves out the access lines of requests to these paths, which commas separate."""
    if paths:
        logging.getLogger("uvicorn.access").addFilter(_PathFilter([path.strip() for path in paths.split(",")]))


def set_up_logging(config: HTTPConfig) -> None:
    """Adds a handler on standard error; loggers of other libraries log warnings and errors only.

    `config.log_config_file` replaces all of that.

    Raises:
        ServeError: The file cannot be used.
    """
    if config.log_config_file is not None:
        _configure_from_file(config.log_config_file)
        return
    handler = logging.StreamHandler(sys.stderr)
    has_color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(LogFormatter(config.log_format, has_color=has_color, context=_request))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level_number(config.log_level))


def _request() -> dict[str, str]:
    request_id = current_request_id.get()
    return {} if request_id == "-" else {"request_id": request_id}


def _configure_from_file(path: str) -> None:
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        # By default the library disables every logger that exists already.
        logging.config.dictConfig({"disable_existing_loggers": False, **settings})
    except OSError as error:
        raise ServeError(f"--log-config-file {path}: {error.strerror}", exit_code=2) from None
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ServeError(f"--log-config-file {path}: {reason}", exit_code=2) from error
