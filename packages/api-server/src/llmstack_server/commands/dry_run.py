"""Dry runs: what every flag became, and what is missing for a start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmstack_llm.options.resolve import Settings
from llmstack_server.commands.custom_modules import missing_modules
from llmstack_server.options.errors import ServeError
from llmstack_server.options.server_options import read_assumed_devices
from llmstack_server.options.several_models import serve_config

if TYPE_CHECKING:
    from llmstack_server.options.config import ServeConfig, ServedModels


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        table: A line for each option, with its source.
        problems: A sentence for each thing that is missing; empty if the server would start.
    """

    table: str
    warnings: tuple[str, ...]
    problems: tuple[str, ...]


def dry_run(settings: Settings) -> DryRun:
    """Checks effective options, devices and the model's files; nothing is loaded, downloaded or started."""
    warnings = list(settings.warnings)
    problems: list[str] = []
    try:
        config = serve_config(settings)
    except ServeError as error:
        problems += str(error).splitlines()
    else:
        settings, warnings = config.settings, list(config.warnings)
        warnings += [] if config.model_choice is None else [config.model_choice]
        try:
            warnings += check_files(config)
        except ServeError as error:
            problems += str(error).splitlines()
    problems += [*_device_problems(settings), *missing_modules(settings)]
    return DryRun(settings.table(), tuple(warnings), tuple(problems))


def check_files(config: ServeConfig) -> list[str]:
    """Checks models and adapters where they are on this machine, and returns a warning where the model is not.

    Raises:
        ServeError: The model cannot run, or another file is missing; the text has a line for each reason.
    """
    if config.settings["assume_model"]:
        return []
    if config.models is not None:
        return check_models(config.models)
    problems: list[str] = []
    warnings: list[str] = []
    try:
        warnings = check_model_files(config)
    except ServeError as error:
        problems = str(error).splitlines()
    from llmstack_server.serving.start_checks import adapter_problems, reload_problems

    if problems := [*problems, *adapter_problems(config), *reload_problems(config)]:
        raise ServeError("\n".join(problems))
    return warnings


def check_models(models: ServedModels) -> list[str]:
    """Does the same for each of several models, and for the memory of those on this machine."""
    from llmstack_model_files import is_local_name
    from llmstack_server.serving.models_server import memory_plans

    local = tuple(one for one in models.models if one.config.model is None or is_local_name(one.config.model))
    memory_plans(models._replace(models=local))
    away = [one.entry for one in models.models if all(one is not other for other in local)]
    return [f"the files of {one.model} ({one.name}) are not checked: it is no local folder" for one in away]


def check_model_files(config: ServeConfig) -> list[str]:
    """Checks the model's files where they are on this machine, and returns a warning where they are not.

    Raises:
        ServeError: The model cannot run; the text has a line for each reason.
    """
    from llmstack_model_files import is_local_name
    from llmstack_server.serving.launcher import check_model

    if config.model is not None and not is_local_name(config.model):
        return [f"the files of {config.model} are not checked, since it is not a local folder"]
    check_model(config)
    return []


def _device_problems(settings: Settings) -> Iterator[str]:
    assumed = settings["assume_devices"]
    if assumed is None:
        return
    count, _ = read_assumed_devices(assumed)
    sizes = {
        flag: int(settings[flag.removeprefix("--").replace("-", "_")])
        for flag in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    }
    if "ray" in (settings["distributed_executor_backend"], settings["data_parallel_backend"]):
        return  # it places them on any machine of its cluster
    if settings["data_parallel_size_local"] is not None:
        sizes["--data-parallel-size-local"] = settings["data_parallel_size_local"]
        del sizes["--data-parallel-size"]
    needed = math.prod(sizes.values())
    if settings["nnodes"] > 1:
        needed //= settings["nnodes"]
    if needed > count:
        named = " and ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        verb = "need" if " and " in named else "needs"
        here = f" on each of {settings['nnodes']} machines" if settings["nnodes"] > 1 else ""
        yield f"{named} {verb} {needed} devices{here}, and there are {count}"
