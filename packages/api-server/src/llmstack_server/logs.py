"""Sets up logging for the process; the only place that adds a handler."""

from __future__ import annotations

import logging
import sys

from llmstack_server.config import HTTPConfig

OUR_LOGGERS = ("llmstack_server", "llmstack_llm", "llmstack_engine_core", "llmstack_model_files")
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LEVELS = {"trace": logging.DEBUG}


def level_number(name: str) -> int:
    """The number of a level by its name in lower case."""
    return _LEVELS.get(name, getattr(logging, name.upper(), logging.INFO))


def set_up_logging(config: HTTPConfig) -> None:
    """One handler on standard error; our loggers at the level asked for, others from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level_number(config.log_level))
