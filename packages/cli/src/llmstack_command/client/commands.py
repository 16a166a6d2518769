"""The subcommands `llmstack chat` and `llmstack complete`; light, since `llmstack --help` imports them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from llmstack_command.errors import CommandLineError

DEFAULT_URL = "http://localhost:8000/v1"


class ChatCommand:
    """`llmstack chat`."""

    name = "chat"
    help = "talk to a running server's model in the terminal"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        _add_arguments(parser)
        parser.add_argument("--system-prompt", metavar="TEXT", help="instructions that come before the conversation")

    def run(self, namespace: argparse.Namespace) -> int:
        """Talks until Ctrl-D; `--quick` and a pipe ask once."""
        from llmstack_command.client.run import run_chat

        return _run(self.name, run_chat, namespace)


class CompleteCommand:
    """`llmstack complete`."""

    name = "complete"
    help = "let a running server's model continue a text"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags."""
        _add_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Continues each line until Ctrl-D; `--quick` and a pipe bring one text."""
        from llmstack_command.client.run import run_complete

        return _run(self.name, run_complete, namespace)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--url", default=DEFAULT_URL, metavar="URL", help=f"the server's address (default: {DEFAULT_URL})")
    add("--model-name", metavar="NAME", help="the model's name in the API (default: the first the server lists)")
    add("--api-key", metavar="KEY", help="better in LLMSTACK_API_KEY or OPENAI_API_KEY: lists of processes show flags")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this once, print the answer, and end")
    add = parser.add_argument_group("sampling (default: the server's)").add_argument
    add("--temperature", type=float, metavar="X", help="0 always takes the likeliest token")
    add("--top-p", type=float, metavar="X", help="sample from the likeliest tokens that together have this share")
    add("--max-tokens", type=int, metavar="N", help="length of an answer at most")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def _run(name: str, run: Callable[[argparse.Namespace], None], namespace: argparse.Namespace) -> int:
    from llmstack_command.client.errors import ApiError

    try:
        run(namespace)
    except ApiError as error:
        raise CommandLineError(str(error), prog=f"llmstack {name}", exit_code=1) from error
    return 0
