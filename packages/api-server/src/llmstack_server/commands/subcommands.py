"""The subcommands `llmstack serve` and `llmstack run-batch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmstack_server.commands.batch.errors import BatchError
from llmstack_server.options.errors import ServeError

if TYPE_CHECKING:
    from llmstack_server.options.config import ServeConfig

_CHECKED = "checked options"
"""Attribute of a namespace whose options have been checked."""


class ServeCommand:
    """The subcommand `llmstack serve [model]`."""

    name = "serve"
    help = "serve a model through an OpenAI-compatible HTTP API"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from llmstack_server.options.command_line import add_serve_arguments

        add_serve_arguments(parser)

    def problems(self, namespace: argparse.Namespace) -> list[str]:
        """A sentence for each option at fault."""
        try:
            setattr(namespace, _CHECKED, _serve_config(namespace))
        except ServeError as error:
            return str(error).splitlines()
        return []

    def run(self, namespace: argparse.Namespace) -> int:
        """Serves until a signal or the engine's death; returns the exit code."""
        try:
            config: ServeConfig = getattr(namespace, _CHECKED, None) or _serve_config(namespace)
            if config.settings["dry_run"]:
                _write("serve", "warning", [*config.warnings, *_check_model(config)])
                sys.stdout.write(f"{config.settings.table()}\n")
                return 0
            # Everything below is heavy, and not needed for `--help` or a wrong flag.
            from llmstack_server.serving.serve import run_serve

            return run_serve(config)
        except ServeError as error:
            _write("serve", "error", str(error).splitlines())
            return error.exit_code


class RunBatchCommand:
    """The subcommand `llmstack run-batch -i FILE -o FILE [model]`."""

    name = "run-batch"
    help = "answer a file of requests in OpenAI's batch form, with a model of its own or a running server"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from llmstack_server.commands.batch.flags import add_batch_arguments

        add_batch_arguments(parser)

    def problems(self, namespace: argparse.Namespace) -> list[str]:
        """A sentence for each option at fault."""
        from llmstack_server.commands.batch.flags import read_options

        try:
            setattr(namespace, _CHECKED, read_options(namespace, os.environ))
        except BatchError as error:
            return str(error).splitlines()
        return []

    def run(self, namespace: argparse.Namespace) -> int:
        """Runs the batch; returns 0 once every line has an answer or an error in the output, else 1."""
        from llmstack_server.commands.batch.flags import read_options

        try:
            options, config = getattr(namespace, _CHECKED, None) or read_options(namespace, os.environ)
            # Everything below is heavy, and not needed for `--help` or a wrong flag.
            from llmstack_server.commands.batch.run import run_batch

            return run_batch(options, config)
        except (BatchError, ServeError) as error:
            _write("run-batch", "error", str(error).splitlines())
            return error.exit_code


def _serve_config(namespace: argparse.Namespace) -> ServeConfig:
    """The checked configuration of a parsed line.

    Raises:
        ServeError: Options are at fault; the text has a line for each.
    """
    from llmstack_server.options.command_line import settings_from
    from llmstack_server.options.config import config_from
    from llmstack_server.options.environment import export_hub_settings

    settings = settings_from(namespace, os.environ)
    export_hub_settings(settings, os.environ)
    try:
        return config_from(settings)
    except ServeError:
        _write("serve", "warning", settings.warnings)
        raise


def _check_model(config: ServeConfig) -> list[str]:
    """Checks the model's files where they are on this machine, and returns a warning where they are not.

    Raises:
        ServeError: The model cannot run; the text has a line for each reason.
    """
    from llmstack_model_files import looks_like_path
    from llmstack_server.serving.launcher import check_model

    if config.model is not None and not looks_like_path(config.model):
        return [f"the files of {config.model} are not checked, since it is not a local folder"]
    check_model(config)
    return []


def _write(command: str, kind: str, lines: Iterable[str]) -> None:
    """Writes lines to standard error, before there is a log."""
    sys.stderr.write("".join(f"llmstack {command}: {kind}: {line}\n" for line in lines))
