"""The subcommands `chat`, `complete` and `top`, imported by `llmstack --help`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from llmstack_command.errors import CommandLineError

DEFAULT_URL = "http://localhost:8000/v1"


class ChatCommand:
    """A conversation with a running server's model."""

    name = "chat"
    help = "talk to a running server's model in the terminal"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_arguments(parser)
        parser.add_argument("--system-prompt", metavar="TEXT", help="instructions before the conversation")

    def run(self, namespace: argparse.Namespace) -> int:
        """Answers messages until Ctrl-D; with `--quick` or a pipe, one message."""
        from llmstack_command.client.run import run_chat

        return _run(self.name, run_chat, namespace)


class CompleteCommand:
    """Completions of texts by a running server's model."""

    name = "complete"
    help = "let a running server's model continue a text"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Continues each line until Ctrl-D; with `--quick` or a pipe, one text."""
        from llmstack_command.client.run import run_complete

        return _run(self.name, run_complete, namespace)


class TopCommand:
    """The requests of a running server."""

    name = "top"
    help = "show the requests of a running server in the terminal"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_server_arguments(parser)
        parser.add_argument("--engine", type=int, metavar="N", help="index of an engine core (default: all of them)")
        parser.add_argument("--once", action="store_true", help="print what is there, and exit")

    def run(self, namespace: argparse.Namespace) -> int:
        """Draws until `q` or Ctrl-C; without a terminal it prints one line per change."""
        from llmstack_command.client.top import run_top

        return _run(self.name, run_top, namespace)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = _add_server_arguments(parser)
    add("--model-name", metavar="NAME", help="the model's name in the API (default: the first the server lists)")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this message, print the answer, and exit")
    add = parser.add_argument_group("sampling (default: the server's)").add_argument
    add("--temperature", type=float, metavar="X", help="0 always chooses the most likely token")
    add("--top-p", type=float, metavar="X", help="sample from the most likely tokens with this total probability")
    add("--max-tokens", type=int, metavar="N", help="maximum length of an answer")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def _add_server_arguments(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    add = parser.add_argument_group("server").add_argument
    add("--url", default=DEFAULT_URL, metavar="URL", help=f"the server's address (default: {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help="prefer LLMSTACK_API_KEY or OPENAI_API_KEY: process lists show flags")
    return add


def _run(name: str, run: Callable[[argparse.Namespace], None], namespace: argparse.Namespace) -> int:
    from llmstack_command.errors import ApiError

    try:
        run(namespace)
    except ApiError as error:
        raise CommandLineError(str(error), prog=f"llmstack {name}", exit_code=1) from error
    return 0
