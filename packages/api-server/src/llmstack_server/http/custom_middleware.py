"""Middleware of the user's own, by name: `--middleware module:name`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from llmstack_server.errors import ServeError


def add_custom_middleware(app: FastAPI, names: tuple[str, ...]) -> None:
    """Puts each around the application, the last one outermost.

    Raises:
        ServeError: One cannot be loaded, or is neither a class nor an async function.
    """
    for name in names:
        found: Any = load_middleware(name)
        if isinstance(found, type):
            app.add_middleware(cast("Any", found))
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)


def load_middleware(name: str) -> Any:
    """The ASGI class, or the async function of a request and what answers it, at `module:name` or `module.name`.

    Raises:
        ServeError: There is none; the text says why.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise ServeError(f"--middleware {name[:128]}: expected module:name", exit_code=2)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever somebody else's module raises when it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ServeError(f"--middleware {name[:128]} cannot be loaded: {reason}", exit_code=2) from error
    if not isinstance(found, type) and not inspect.iscoroutinefunction(found):
        raise ServeError(f"--middleware {name[:128]} is neither a class nor an async function", exit_code=2)
    return found
