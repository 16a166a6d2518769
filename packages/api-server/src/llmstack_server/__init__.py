"""An OpenAI-compatible HTTP server for llmstack."""

from __future__ import annotations

import functools


@functools.cache
def server_version() -> str:
    """Version of the `llmstack-server` distribution; `source` where it runs without being installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("llmstack-server")
    except importlib.metadata.PackageNotFoundError:
        return "source"
