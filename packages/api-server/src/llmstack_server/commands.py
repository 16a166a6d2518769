"""The subcommand `llmstack serve`; light, since `llmstack --help` imports it."""

from __future__ import annotations

import argparse
import os
import sys

from llmstack_server.config import config_from
from llmstack_server.environment import export_hub_settings, read_environment
from llmstack_server.errors import ServeError
from llmstack_server.flags import add_serve_arguments


class ServeCommand:
    """`llmstack serve [model]`."""

    name = "serve"
    help = "serve a model through an OpenAI-compatible HTTP API"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        add_serve_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Serves until a signal or the engine's death; returns the exit code."""
        try:
            config = config_from(namespace, read_environment(os.environ))
            export_hub_settings(namespace, os.environ)
            # Everything below is heavy, and not needed for `--help` or a wrong flag.
            from llmstack_server.serve import run_serve

            return run_serve(config)
        except ServeError as error:
            sys.stderr.write(f"llmstack serve: error: {error}\n")
            return error.exit_code
