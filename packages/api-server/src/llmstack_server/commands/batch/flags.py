"""Options of `llmstack run-batch`: its own, and model options of `llmstack serve`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from llmstack_llm.options.command_line import add_foreign_flags, add_key_flags, add_options, given_in, positional_dest
from llmstack_llm.options.option import Option, OptionGroup, options_of
from llmstack_llm.options.problem import Problem
from llmstack_llm.options.resolve import COMMAND_LINE, Settings, resolve
from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, SERVE_OPTIONS, settings_from
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.options.errors import ServeError
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import LogLevel

# Themes that concern a server, which a batch does not need.
SERVER_TITLES = frozenset(
    {"Server", "Connections", "TLS", "Browsers and proxies", "Logs", "Limits", "Processes", "Observability"}
)


@option_group
class BatchOptions(OptionGroup):
    """The requests, the server that answers them, and the file for the answers."""

    title = "Batch"

    input_file: str = option(
        "", short="-i", metavar="FILE", help="requests, one JSON object per line; - is standard input"
    )
    output_file: str = option("", short="-o", metavar="FILE", help="file to append answers to; - is standard output")
    url: str | None = option(None, metavar="URL", help="server to ask; without it the model runs in this command")
    api_key: str | None = option(
        None,
        secret=True,
        environment=("VLLM_API_KEY",),
        metavar="KEY",
        help="API key of the server at --url; prefer LLMSTACK_API_KEY",
    )
    max_concurrency: int = option(128, at_least=1, help="maximum concurrent requests")
    log_level: LogLevel = option(
        "warning",
        ignores_case=True,
        environment=("LLMSTACK_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL"),
        help="log level of llmstack",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds files that are not named."""
        yield from super().conflicts()
        for name in ("input_file", "output_file"):
            if not getattr(self, name):
                yield Problem(f"{{{name}}} is required")


MODEL_OPTIONS: Sequence[Option] = tuple(option for option in SERVE_OPTIONS if option.title not in SERVER_TITLES)


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of `llmstack run-batch`."""
    add_options(parser, [*options_of(BatchOptions), *MODEL_OPTIONS])
    add_key_flags(parser, MODEL_OPTIONS)
    add_foreign_flags(parser, ALL_FOREIGN_FLAGS)


def read_options(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[BatchOptions, ServeConfig | None]:
    """The options of the batch, and the configuration of its model; None where another server has the model.

    Raises:
        BatchError: Options are at fault; the text has a line for each.
    """
    own = resolve(options_of(BatchOptions), namespace, environment)
    batch, problems = own.build(BatchOptions), own.problems
    config = read_model(namespace, environment, own, problems)
    if problems or batch is None:
        raise BatchError("\n".join(problems), exit_code=2)
    return batch, config


def read_model(
    namespace: argparse.Namespace,
    environment: Mapping[str, str],
    own: Settings,
    problems: list[str],
    options: Sequence[Option] = MODEL_OPTIONS,
    **replaced: object,
) -> ServeConfig | None:
    """The configuration of a command's model; None where the server at its `url` has it, or options are at fault.

    Args:
        namespace: The parsed line.
        environment: Variables that set options.
        own: The command's other options, with `url` and `log_level`.
        problems: A sentence for each option at fault is added to it.
        options: Those of the model.
        replaced: Values of further options of a server.
    """
    model = settings_from(namespace, environment, options)
    if own["url"] is not None:
        given = [setting.option for setting in model.all() if setting.source == COMMAND_LINE]
        problems += [f"{_as_given(option, namespace)}: the server at --url has a model of its own" for option in given]
        return None
    try:
        return config_from(model.with_defaults(SERVE_OPTIONS).replaced(log_level=own["log_level"], **replaced))
    except ServeError as error:
        problems += str(error).splitlines()
        return None


def _as_given(option: Option, namespace: argparse.Namespace) -> str:
    is_positional = bool(option.declared.positional and given_in(namespace, positional_dest(option)))
    return option.declared.positional if is_positional else option.declared.flag
