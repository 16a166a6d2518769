"""The subcommands `llmstack serve`, `run-batch` and `transcribe`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.options.errors import ServeError

if TYPE_CHECKING:
    from llmstack_llm.options.resolve import Settings
    from llmstack_server.options.config import ServeConfig

_CHECKED = "checked options"
"""Attribute of a namespace whose options have been checked; None after a dry run."""
EXIT_CODE = 1
"""Exit status of a dry run or a translation that finds something missing."""


class ServeCommand:
    """The subcommand `llmstack serve [model]`."""

    name = "serve"
    help = "serve a model through an OpenAI-compatible HTTP API"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from llmstack_server.options.command_line import add_serve_arguments

        add_serve_arguments(parser)

    def problems(self, namespace: argparse.Namespace) -> list[str]:
        """A sentence for each option at fault; for a dry run, after the table of all options."""
        settings = serve_settings(namespace)
        if settings["translate"] is not None:
            namespace.exit_code = EXIT_CODE
            setattr(namespace, _CHECKED, None)
            return _print_translation(settings["translate"])
        if settings["dry_run"]:
            # Here, so that the table is printed and the exit code is the same where other flags are unknown.
            namespace.exit_code = EXIT_CODE
            setattr(namespace, _CHECKED, None)
            return _print_dry_run(settings)
        try:
            setattr(namespace, _CHECKED, _serve_config(settings))
        except ServeError as error:
            return str(error).splitlines()
        from llmstack_server.commands.custom_modules import missing_modules

        return list(missing_modules(settings))

    def run(self, namespace: argparse.Namespace) -> int:
        """Serves until a signal or the engine's death; returns the exit code."""
        try:
            if hasattr(namespace, _CHECKED):
                config: ServeConfig | None = getattr(namespace, _CHECKED)
            else:
                settings = serve_settings(namespace)
                if settings["dry_run"]:
                    problems = _print_dry_run(settings)
                    _write("serve", "error", problems)
                    return EXIT_CODE if problems else 0
                config = _serve_config(settings)
            if config is None or _has_nothing_to_do(config):
                return 0
            return _serve(config)
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


class TranscribeCommand:
    """The subcommand `llmstack transcribe FILE…`."""

    name = "transcribe"
    help = "write what is said in sound files, with a model of its own or a running server"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from llmstack_server.commands.transcribe.flags import add_transcribe_arguments

        add_transcribe_arguments(parser)

    def problems(self, namespace: argparse.Namespace) -> list[str]:
        """A sentence for each option at fault."""
        from llmstack_server.commands.transcribe.flags import read_transcribe_options

        try:
            setattr(namespace, _CHECKED, read_transcribe_options(namespace, os.environ))
        except BatchError as error:
            return str(error).splitlines()
        return []

    def run(self, namespace: argparse.Namespace) -> int:
        """Writes the transcripts; returns 0 once every file has one, else 1."""
        from llmstack_server.commands.transcribe.flags import read_transcribe_options

        try:
            asked = getattr(namespace, _CHECKED, None) or read_transcribe_options(namespace, os.environ)
            # Everything below is heavy, and not needed for `--help` or a wrong flag.
            from llmstack_server.commands.transcribe.run import run_transcribe

            return run_transcribe(*asked)
        except (BatchError, ServeError) as error:
            _write("transcribe", "error", str(error).splitlines())
            return error.exit_code


def _serve(config: ServeConfig) -> int:
    """Serves; an engine core's process imports its model runner while this one imports what answers HTTP."""
    from llmstack_engine_client.processes.waiting_process import early_process
    from llmstack_server.serving.garbage import start_without_collections

    runner = config.engine.runner_name if config.starts_engine_processes else None
    with early_process(runner):
        # Everything below is heavy, and not needed for `--help` or a wrong flag.
        with start_without_collections():
            from llmstack_server.serving.serve import run_serve
        return run_serve(config)


def _has_nothing_to_do(config: ServeConfig) -> bool:
    from llmstack_server.options.torchrun import has_nothing_to_do

    if not has_nothing_to_do(config.settings, os.environ):
        return False
    _write("serve", "info", [f"process {os.environ['LOCAL_RANK']} of this machine ends: the first starts all ranks"])
    return True


def serve_settings(namespace: argparse.Namespace) -> Settings:
    """The effective options of a parsed line."""
    from llmstack_server.options.command_line import settings_from
    from llmstack_server.options.environment import export_hub_settings
    from llmstack_server.options.torchrun import with_torchrun

    settings = with_torchrun(settings_from(namespace, os.environ), os.environ)
    export_hub_settings(settings, os.environ)
    return settings


def _serve_config(settings: Settings) -> ServeConfig:
    """The checked configuration of effective options.

    Raises:
        ServeError: Options are at fault; the text has a line for each.
    """
    from llmstack_server.options.several_models import serve_config

    try:
        return serve_config(settings)
    except ServeError:
        _write("serve", "warning", settings.warnings)
        raise


def _print_dry_run(settings: Settings) -> list[str]:
    """Prints what every flag became, and returns a sentence for each thing that is missing."""
    from llmstack_server.commands.dry_run import dry_run

    found = dry_run(settings)
    _write("serve", "warning", found.warnings)
    sys.stdout.write(f"{found.table}\n")
    return list(found.problems)


def _print_translation(line: str) -> list[str]:
    """Prints a command of llmstack, and returns a sentence for each thing that it lacks."""
    from llmstack_server.commands.translate import translate

    try:
        found = translate(line)
    except ValueError as error:
        return [f"--translate: {error}"]
    sys.stdout.write(f"{found}\n")
    return found.missing


def _write(command: str, kind: str, lines: Iterable[str]) -> None:
    """Writes lines to standard error, before there is a log."""
    sys.stderr.write("".join(f"llmstack {command}: {kind}: {line}\n" for line in lines))
