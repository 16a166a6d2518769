"""The ASGI application with its routes and middleware."""

from llmstack_server.app.application import build_app, build_model_app, make_app

__all__ = ["build_app", "build_model_app", "make_app"]
