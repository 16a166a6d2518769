"""Facts of a start on this machine.

`llmstack doctor` finds this module by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmstack_server.commands.dry_run import dry_run
from llmstack_server.commands.subcommands import serve_settings
from llmstack_server.options.errors import ServeError
from llmstack_server.serving.sockets import bind_socket
from llmstack_server.serving.state_directory import check_state_folder

if TYPE_CHECKING:
    from llmstack_llm.options.resolve import Settings

Fact = tuple[str, str, str]


def start_facts(namespace: argparse.Namespace) -> Iterator[Fact]:
    """Name, state (`ok`, `note`, `problem`) and sentence of what a start with this parsed line of `serve` needs.

    Nothing is started or written. A problem is a sentence of the start itself, `cause; remedy`.
    """
    settings = serve_settings(namespace)
    found = dry_run(settings)
    for problem in found.problems:
        yield "start", "problem", problem
    if not found.problems:
        yield "start", "ok", f"the options and the files of {settings['model'] or 'the default model'} are accepted"
    for warning in found.warnings:
        yield "start", "note", warning
    yield _port(settings)
    yield _state_folder(settings["state_dir"])


def _port(settings: Settings) -> Fact:
    if settings["uds"] is not None:
        return "port", "ok", f"none: the server listens on the unix socket {settings['uds']}"
    host, port = settings["host"], settings["port"]
    try:
        bind_socket(host, port).close()
    except ServeError as error:
        return "port", "problem", str(error)
    return "port", "ok", f"{port} on {host} is free" if port else f"any free one on {host}"


def _state_folder(path: str | None) -> Fact:
    if path is None:
        return "state folder", "ok", "none: nothing outlives the server without --state-dir"
    try:
        exists = check_state_folder(path)
    except ServeError as error:
        return "state folder", "problem", str(error)
    return "state folder", "ok", f"{path}{'' if exists else ', which the start creates'}"
