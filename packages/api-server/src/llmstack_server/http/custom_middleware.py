"""Middleware of the user's own, by name: `--middleware module:name`."""

from __future__ import annotations

import inspect
from typing import Any, cast

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from llmstack_server.errors import ServeError
from llmstack_server.named_objects import load_named


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
    found = load_named("--middleware", name)
    if not isinstance(found, type) and not inspect.iscoroutinefunction(found):
        raise ServeError(f"--middleware {name[:128]} is neither a class nor an async function", exit_code=2)
    return found
