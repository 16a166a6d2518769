"""Sessions with the server that a command line names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmstack_command.client.address import Address
from llmstack_command.client.api import ApiClient
from llmstack_command.client.session import Asker, ChatSession, CompletionSession, converse
from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError

API_KEY_VARIABLES = ("LLMSTACK_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
SAMPLING_FIELDS = ("temperature", "top_p", "max_tokens", "seed")
_MAX_NAMES_SHOWN = 8


def run_chat(namespace: argparse.Namespace) -> None:
    """Runs `llmstack chat`; raises ApiError."""
    client, terminal = connect(namespace), Terminal()
    body = shared_fields(client, namespace)
    session = ChatSession(client, terminal, body, namespace.system_prompt)
    if not terminal.is_interactive or namespace.quick is not None:
        _run(session, terminal, namespace.quick)
        return
    terminal.note(f"{body['model']} at {Address.parse(namespace.url)}; /help lists the commands")
    history = history_path(os.environ)
    terminal.open_history(history)
    try:
        _run(session, terminal, None)
    finally:
        terminal.save_history(history)


def history_path(variables: Mapping[str, str]) -> Path:
    """The file of the lines of earlier conversations."""
    state = variables.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "llmstack" / "chat_history"


def run_complete(namespace: argparse.Namespace) -> None:
    """Runs `llmstack complete`; raises ApiError."""
    client, terminal = connect(namespace), Terminal()
    _run(CompletionSession(client, terminal, shared_fields(client, namespace)), terminal, namespace.quick)


def connect(namespace: argparse.Namespace) -> ApiClient:
    """A client of the server at `--url`; raises ApiError if that is not a URL."""
    return ApiClient(Address.parse(namespace.url), namespace.api_key or api_key_from(os.environ))


def api_key_from(variables: Mapping[str, str]) -> str | None:
    """The first API key in the environment, None without one."""
    return next((variables[name] for name in API_KEY_VARIABLES if variables.get(name)), None)


def shared_fields(client: ApiClient, namespace: argparse.Namespace) -> dict[str, Any]:
    """The model and the sampling fields of every request; values that were not given are left to the server.

    Raises:
        ApiError: The server does not list its models, or lacks `--model-name`.
    """
    names = client.model_names()
    model = namespace.model_name or names[0]
    if model not in names:
        raise ApiError(f"--model-name: the server has no '{model}'; it has {', '.join(names[:_MAX_NAMES_SHOWN])}")
    given = {name: getattr(namespace, name) for name in SAMPLING_FIELDS}
    return {"model": model, **{name: value for name, value in given.items() if value is not None}}


def _run(asker: Asker, terminal: Terminal, quick: str | None) -> None:
    if quick is None:
        converse(asker, terminal)
    else:
        asker.ask(quick)
