"""The flags of `llmstack run-batch`: its own, and those of `llmstack serve` that are about the model."""

from __future__ import annotations

import argparse

from llmstack_server.batch.errors import BatchError
from llmstack_server.flag_types import at_least
from llmstack_server.flags import LOG_LEVELS, add_serve_arguments

DEFAULT_MAX_CONCURRENCY = 128
# Groups of flags that say something about connections, which a batch has none of.
SERVER_GROUPS = frozenset(
    {"server", "connections", "TLS", "browsers and proxies", "logs", "limits", "processes", "observability"}
)
_OWN = ("input_file", "output_file", "url", "api_key", "max_concurrency", "log_level")


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of `llmstack run-batch`."""
    add = parser.add_argument_group("batch").add_argument
    add(
        "--input-file",
        "-i",
        required=True,
        metavar="FILE",
        help="requests, a JSON object each line; - is standard input",
    )
    add("--output-file", "-o", required=True, metavar="FILE", help="answers are added to it; - is standard output")
    add("--url", metavar="URL", help="ask the server at this address; without it the model runs in this command")
    add("--api-key", metavar="KEY", help="the key of the server at --url; better in LLMSTACK_API_KEY")
    add(
        "--max-concurrency",
        type=at_least(1),
        default=DEFAULT_MAX_CONCURRENCY,
        metavar="N",
        help=f"requests in flight at once (default: {DEFAULT_MAX_CONCURRENCY})",
    )
    add("--log-level", choices=LOG_LEVELS, default="warning", help="level of llmstack's log (default: warning)")
    _add_model_groups(parser)


def serve_namespace(namespace: argparse.Namespace) -> argparse.Namespace:
    """What `llmstack serve` would have parsed with the same flags about the model, and no others."""
    given = {name: value for name, value in vars(namespace).items() if name not in _OWN}
    return argparse.Namespace(**{**_serve_defaults(), **given, "log_level": namespace.log_level})


def check_flags_for_url(namespace: argparse.Namespace) -> None:
    """Refuses flags about a model where another server has its own.

    Raises:
        BatchError: One is given; the text names it.
    """
    for name, default in _serve_defaults().items():
        if name not in _OWN and getattr(namespace, name, default) != default:
            flag = "model" if name == "model_tag" else "--" + name.replace("_", "-")
            raise BatchError(f"{flag}: the server at --url has a model of its own", exit_code=2)


def _add_model_groups(parser: argparse.ArgumentParser) -> None:
    """The groups of `llmstack serve` that are about the model."""
    # argparse shows a parser's groups, and a group's actions, under no public name.
    for group in _serve_parser()._action_groups:
        if group.title not in SERVER_GROUPS:
            ours = parser.add_argument_group(group.title)
            for action in group._group_actions:
                ours._add_action(action)


def _serve_defaults() -> dict[str, object]:
    return vars(_serve_parser().parse_args([]))


def _serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    return parser
