"""Lines of the log, in one format for all processes of a server."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from llmstack_types.vocabulary import LoggingLevel, words_of

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(process_name)s%(name)s: %(message)s"
LOG_LEVELS = words_of(LoggingLevel)
_LEVEL_COLORS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_PLAIN = "\x1b[0m"


def set_log_level(level: str) -> bool:
    """Sets the level of the loggers of llmstack's packages in this process, by one of `LOG_LEVELS`; True."""
    names = [name.partition(".")[0] for name in logging.root.manager.loggerDict if name.startswith("llmstack_")]
    for name in dict.fromkeys(names):
        logging.getLogger(name).setLevel(level.upper())
    return True


class LogFormatter(logging.Formatter):
    """Formats records as text with the time of day, or as one JSON object per line."""

    def __init__(
        self,
        log_format: str = "text",
        process_name: str = "",
        *,
        has_color: bool = False,
        context: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Takes what is the same in all lines of a process.

        Args:
            log_format: One of `LogFormat`.
            process_name: Which process writes; empty for the server's own.
            has_color: Whether warnings and errors are coloured, as on a terminal.
            context: Further fields of JSON lines, read for each record.
        """
        super().__init__(TEXT_FORMAT, "%H:%M:%S")
        self.log_format = log_format
        self._process_name = process_name
        self._has_color = has_color
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        if self.log_format == "json":
            return self._as_json(record)
        record.process_name = f"({self._process_name}) " if self._process_name else ""
        line = super().format(record)
        color = _LEVEL_COLORS.get(record.levelname) if self._has_color else None
        return line if color is None else f"{color}{line}{_PLAIN}"

    def _as_json(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name or "server",
            "logger": record.name,
            "message": record.getMessage(),
            **self._context(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_format_in_use() -> str:
    """The format of this process's log, for the processes that it starts."""
    for handler in logging.root.handlers:
        if isinstance(handler.formatter, LogFormatter):
            return handler.formatter.log_format
    return "text"
