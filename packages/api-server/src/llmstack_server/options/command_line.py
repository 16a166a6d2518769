"""The command line of `llmstack serve`, derived from the declared options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.accepted_flags import ACCEPTED_FLAGS
from llmstack_llm.options.command_line import add_foreign_flags, add_key_flags, add_options, given_in, positional_dest
from llmstack_llm.options.foreign import ForeignFlag, replaced_flags
from llmstack_llm.options.option import Option, key_flags, options_of
from llmstack_llm.options.refused_flags import REFUSED_FLAGS
from llmstack_llm.options.resolve import ConfigFile, Settings, resolve
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.config_file import read_config_file
from llmstack_server.options.environment import ignored_variables
from llmstack_server.options.http_options import (
    AnswerConfig,
    BatchConfig,
    CORSConfig,
    RateLimits,
    RealtimeConfig,
    RequestLogConfig,
    ResponseStoreConfig,
    TLSConfig,
)
from llmstack_server.options.observability import ObservabilityConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.options.server_options import (
    AccessOptions,
    HubOptions,
    NameOptions,
    SourceOptions,
)
from llmstack_server.options.vllm_flags import FlagList, read_flag_list, with_forms

_GROUPS: Sequence[type[Any]] = (
    EngineArgs, NameOptions, HubOptions, ChatOptions, AnswerConfig,
    SourceOptions, HTTPConfig, AccessOptions, TLSConfig, CORSConfig, RequestLogConfig, RateLimits, ResponseStoreConfig,
    BatchConfig, RealtimeConfig,
    ObservabilityConfig, ProcessConfig, AdapterNames, ReloadOptions,
)  # fmt: skip
SERVE_OPTIONS: Sequence[Option] = tuple(
    option for group in _GROUPS for option in options_of(group) if option.declared.flag
)
KEY_FLAGS: Mapping[str, str] = key_flags(SERVE_OPTIONS)
VLLM_FLAGS: FlagList = read_flag_list()
ALL_FOREIGN_FLAGS: Mapping[str, ForeignFlag] = with_forms(
    {**REFUSED_FLAGS, **ACCEPTED_FLAGS, **replaced_flags(SERVE_OPTIONS)}, VLLM_FLAGS
)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every flag of `llmstack serve`."""
    add_options(parser, SERVE_OPTIONS)
    add_key_flags(parser, SERVE_OPTIONS)
    add_foreign_flags(parser, ALL_FOREIGN_FLAGS)


def settings_from(
    namespace: argparse.Namespace, environment: Mapping[str, str], options: Sequence[Option] = SERVE_OPTIONS
) -> Settings:
    """The effective options of a parsed line, with problems and warnings but no exceptions.

    `options`: The options of the parser.
    """
    file, problems = _config_file(namespace, environment, options)
    settings = resolve(options, namespace, environment, file, ALL_FOREIGN_FLAGS)
    settings.problems[:0] = problems
    settings.warnings += [str(flag) for flag in settings.accepted]
    settings.warnings += [*_ambiguous_model(namespace, options), *_other_backend(settings)]
    if ignored := ignored_variables(environment, SERVE_OPTIONS):
        settings.warnings.append(f"environment variables without a meaning here: {', '.join(ignored)}")
    return settings


def _config_file(
    namespace: argparse.Namespace, environment: Mapping[str, str], options: Sequence[Option]
) -> tuple[ConfigFile | None, list[str]]:
    own = [option for option in options if option.key == "config"]
    if not own:
        return None, []
    if len(given_in(namespace, "config")) > 1:
        return None, ["--config: give one file"]
    path = resolve(own, namespace, environment)["config"]
    if path is None:
        return None, []
    try:
        return read_config_file(path, KEY_FLAGS), []
    except ValueError as error:
        return None, [f"--config {path}: {error}"]


def _other_backend(settings: Settings) -> list[str]:
    """A warning where constraints are to be compiled by another library."""
    config = settings["structured_outputs_config"]
    if not config:
        return []
    from llmstack_llm.admission.structured_outputs import OTHER_BACKENDS  # late: most lines need none

    backend = str(config.get("backend", "")).partition(":")[0]
    if backend not in OTHER_BACKENDS:
        return []
    return [f"--structured-outputs-config: backend {backend} has no effect: llguidance compiles every constraint"]


def _ambiguous_model(namespace: argparse.Namespace, options: Sequence[Option]) -> list[str]:
    """A warning where the positional model and `--model` differ."""
    model = next(option for option in options if option.key == "model")
    positional, by_flag = given_in(namespace, positional_dest(model)), given_in(namespace, model.key)
    if positional and by_flag and positional[-1].words != by_flag[-1].words:
        return [f"serving {positional[-1].words[-1]}: --model {by_flag[-1].words[-1]} is ignored"]
    return []
