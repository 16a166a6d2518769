"""The server's own version."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def server_version() -> str:
    """Version of the `llmstack-server` distribution; `source` where it runs without being installed."""
    try:
        return importlib.metadata.version("llmstack-server")
    except importlib.metadata.PackageNotFoundError:
        return "source"
