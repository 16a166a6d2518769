"""Request traces from files, for the simulator."""

from __future__ import annotations

from pathlib import Path

from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_types.traces import TOKENS_PER_HASH_ID, TraceFormat, TraceRequest, parse_trace

__all__ = ["TOKENS_PER_HASH_ID", "TraceFormat", "TraceRequest", "read_trace"]


def read_trace(path: Path, trace_format: TraceFormat, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file, by arrival.

    Raises:
        SimulationError: The file cannot be read, or a line is not of that format; the text names it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse_trace(lines, trace_format, limit)
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SimulationError(f"{path} is not UTF-8 text") from error
    except ValueError as error:
        raise SimulationError(f"{path}: {error}") from error
