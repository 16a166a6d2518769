"""Sets up logging for the process; the only place that adds a handler."""

from __future__ import annotations

import json
import logging
import logging.config
import sys
from pathlib import Path

from llmstack_server.config import HTTPConfig
from llmstack_server.errors import ServeError

OUR_LOGGERS = ("llmstack_server", "llmstack_llm", "llmstack_engine_core", "llmstack_model_files")
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LEVELS = {"trace": logging.DEBUG}


def level_number(name: str) -> int:
    """The number of a level by its name in lower case."""
    return _LEVELS.get(name, getattr(logging, name.upper(), logging.INFO))


def set_up_logging(config: HTTPConfig) -> None:
    """One handler on standard error; our loggers at the level asked for, others from warnings up.

    Raises:
        ServeError: `log_config_file` takes the place of all that, and cannot be used.
    """
    if config.log_config_file is not None:
        _configure_from_file(config.log_config_file)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level_number(config.log_level))


def _configure_from_file(path: str) -> None:
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        # By default the library would silence every logger that exists already.
        logging.config.dictConfig({"disable_existing_loggers": False, **settings})
    except OSError as error:
        raise ServeError(f"--log-config-file {path}: {error.strerror}", exit_code=2) from None
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ServeError(f"--log-config-file {path}: {reason}", exit_code=2) from error
