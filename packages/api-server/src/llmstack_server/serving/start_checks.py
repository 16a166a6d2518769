"""Checks of files that an operator names, before anything listens or starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_server.options.adapter_options import start_modules
from llmstack_server.options.errors import ServeError

if TYPE_CHECKING:
    from llmstack_server.options.config import ServeConfig

OUR_RUNNERS = ("default", "parallel")
USAGE_EXIT_CODE = 2


def check_named_files(config: ServeConfig) -> None:
    """Refuses folders of models and adapters that are not there; reads names and configurations, and no weights.

    Raises:
        ServeError: The text has a line for each reason.
    """
    if problems := [*weight_problems(config), *adapter_problems(config), *reload_problems(config)]:
        raise ServeError("\n".join(problems), exit_code=USAGE_EXIT_CODE)


def weight_problems(config: ServeConfig) -> Iterator[str]:
    """Why a local model has no weights that could be read; other runners than ours read them in their own way."""
    from llmstack_model_files import ModelFilesError, gguf_weights, is_local_name, resolve_model, safetensors_files

    is_ours = config.engine.runner_name in OUR_RUNNERS and not config.processes.is_attached
    if config.model is None or not is_ours or not is_local_name(config.model):
        return
    try:
        folder = resolve_model(config.model, mmproj=config.engine.mmproj, form=config.engine.file_form)
        if config.engine.load_format != "dummy" and not gguf_weights(folder):
            safetensors_files(folder)
    except ModelFilesError as error:
        yield str(error)


def adapter_problems(config: ServeConfig) -> Iterator[str]:
    """Adapters of the start that are no folders of an adapter."""
    from llmstack_model_files import ModelFilesError, check_adapter_folder

    names = set[str]()
    for flag, module in start_modules(config.adapters.modules, config.engine.default_mm_loras):
        try:
            check_adapter_folder(Path(module.path))
        except ModelFilesError as error:
            yield f"{flag} {module.name}: {error}"
        if module.name in names:
            yield f"{flag} {module.name}: another adapter has this name"
        names.add(module.name)


def reload_problems(config: ServeConfig) -> Iterator[str]:
    """Models of `--reload-models` that are no folders of a model; what the hub has is looked for at the reload."""
    from llmstack_model_files import ModelFilesError, check_adapter_folder, is_local_name, resolve_model

    for name, entry in config.reload.entries.items():
        try:
            if entry.model is not None and is_local_name(entry.model):
                resolve_model(entry.model)
            for _, path in entry.adapters or ():
                check_adapter_folder(Path(path))
        except ModelFilesError as error:
            yield f"--reload-models {name}: {error}"
