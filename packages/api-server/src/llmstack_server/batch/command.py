"""The subcommand `llmstack run-batch`; light, since `llmstack --help` imports it."""

from __future__ import annotations

import argparse
import sys

from llmstack_server.batch.errors import BatchError
from llmstack_server.batch.flags import add_batch_arguments
from llmstack_server.errors import ServeError


class RunBatchCommand:
    """`llmstack run-batch -i FILE -o FILE [model]`."""

    name = "run-batch"
    help = "answer a file of requests in OpenAI's batch form, with a model of its own or a running server"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        add_batch_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """0 once every line has its answer in the output, be it an error; 1 where it could not go on."""
        try:
            # Everything below is heavy, and not needed for `--help` or a wrong flag.
            from llmstack_server.batch.run import run_batch

            return run_batch(namespace)
        except (BatchError, ServeError) as error:
            sys.stderr.write(f"llmstack run-batch: error: {error}\n")
            return error.exit_code
