"""The configurations of a server with several models, one for each of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.option import options_of
from llmstack_llm.options.problem import Problem
from llmstack_llm.options.resolve import ConfigFile, Settings, resolve
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, KEY_FLAGS
from llmstack_server.options.config import ServeConfig, ServedModel, ServedModels, config_from
from llmstack_server.options.config_file import flag_of
from llmstack_server.options.errors import ServeError
from llmstack_server.options.models_file import ModelEntry, read_models_file

_FLAG: Final = "--models"
_ONE_FILE, _ONE_PLACE = "the engine cores would share a file", "the engine cores would share an address"
_NO_FILES = "files and batches belong to a server of one model"
_MEMORY = "each model has its 'memory' in the file"
# Key of an option to why it cannot be given beside several models, on the line and in their flags.
_NEVER: Final[Mapping[str, str]] = {
    "reload_models": "a reload exchanges the one model of a server",
    "default_mm_loras": "each model would have an adapter of the same name",
    "weight_update_dir": "its folder has the weights of the one model of a server",
    "api_server_count": "one process decides which models are in memory",
    "headless": "models are loaded for requests over HTTP",
    "engine_address": "models are loaded here",
    "disable_frontend_multiprocessing": "an engine core that ends would end the others",
    "warm_spare": "a spare takes memory that no model has",
    "enable_sleep_mode": "models sleep and wake by their 'idle_sleep' and their requests",
    "otlp_traces_endpoint": "spans name one model",
    "trace": "its lines name one model",
    "extra_routes": "such a route gets the state of one model",
    "nnodes": "models are loaded on this machine",
    "node_rank": "models are loaded on this machine",
    "data_parallel_size_local": "models are loaded on this machine",
    "data_parallel_start_rank": "models are loaded on this machine",
    "data_parallel_address": "models are loaded on this machine",
    "data_parallel_backend": "models are loaded on this machine",
    "max_file_bytes": _NO_FILES,
    "max_file_storage_bytes": _NO_FILES,
    "max_batch_concurrency": _NO_FILES,
    "num_kv_blocks": _MEMORY,
    "gpu_memory_utilization": _MEMORY,
    "num_host_blocks": "the 'memory' of a model has no part for swapped blocks",
    "swap_space": "the 'memory' of a model has no part for swapped blocks",
}
# The same on the line alone: the flags of a model may have them.
_NOT_FOR_ALL: Final[Mapping[str, str]] = {
    "model": "each model stands in the file",
    "served_model_name": "the file has the names",
    "idle_sleep": "each model has its 'idle_sleep' in the file",
    "idle_sleep_level": "each model has its 'sleep_level' in the file",
    "kv_cache_memory_bytes": _MEMORY,
    "mmproj": "it belongs to one model",
    "tokenizer": "it belongs to one model",
    "revision": "it belongs to one model",
    "chat_template": "it belongs to one model",
    "lora_modules": "adapters belong to one model",
    "lora_root": "adapters belong to one model",
    "record_steps": _ONE_FILE,
    "kv_events_config": _ONE_PLACE,
    "kv_transfer_config": _ONE_PLACE,
}
_ENTRY_OPTIONS: Final = tuple(
    option
    for group in (EngineArgs, ChatOptions, AdapterNames)
    for option in options_of(group)
    if option.declared.flag and option.key not in (*_NEVER, "model", "log_level", "log_format")
)


def serve_config(settings: Settings) -> ServeConfig:
    """The configuration of a server with one model, or with those of `--models`.

    Raises:
        ServeError: Options or the file are at fault; the text has a line for each reason.
    """
    if settings["models"] is None:
        return config_from(settings)
    settings.add_problems(_conflicts(settings))
    try:
        file = read_models_file(settings["models"])
    except ValueError as error:
        settings.problems += [f"{_FLAG} {settings['models']}: {line}" for line in str(error).splitlines()]
        raise ServeError("\n".join(settings.problems), exit_code=2) from None
    if settings.problems:
        raise ServeError("\n".join(settings.problems), exit_code=2)
    path, names = settings["models"], tuple(name for one in file.models for name in (one.name, *one.aliases))
    front = config_from(
        settings.replaced(models=None, model=file.models[0].model, served_model_name=names), has_models=True
    )
    models, problems = [], list(_unknown_models(front, path, {entry.name for entry in file.models}))
    for entry in file.models:
        found, faults = _entry_values(path, entry)
        try:
            if faults:
                raise ServeError("\n".join(faults))
            given = found | {
                "models": None, "model": entry.model, "served_model_name": (entry.name, *entry.aliases),
                "idle_sleep": entry.idle_sleep_s, "idle_sleep_level": entry.sleep_level,
                **_part_of_disk(front.settings, entry, found, len(file.models)),
            }  # fmt: skip
            models.append(ServedModel(entry, config_from(front.settings.replaced(_FLAG, **given))))
        except ServeError as error:
            problems += [f"{_FLAG} {path}: {entry.name}: {line}" for line in str(error).splitlines()]
    problems += [f"{_FLAG} {path}: {line}" for line in (*_shared_paths(models), *_shared_names(models))]
    if problems:
        raise ServeError("\n".join(problems), exit_code=2)
    shown = settings.replaced(served_model_name=names, api_key=front.settings["api_key"])
    return replace(front, models=ServedModels(file, tuple(models)), model_choice=None, settings=shown)


def _part_of_disk(line: Settings, entry: ModelEntry, own: Mapping[str, object], num_models: int) -> dict[str, object]:
    """The folder beside `--kv-cache-dir` of the line for the prefixes of one model, and its part of the bytes."""
    if line["kv_cache_dir"] is None or "kv_cache_dir" in own:
        return {}
    part: dict[str, object] = {"kv_cache_dir": f"{line['kv_cache_dir'].rstrip('/')}.{entry.file_name}"}
    if "kv_cache_disk_bytes" in own:
        return part
    return part | {"kv_cache_disk_bytes": max(line["kv_cache_disk_bytes"] // num_models, 1 << 20)}


def _unknown_models(front: ServeConfig, path: str, known: set[str]) -> Iterator[str]:
    """Models of keys that are not in the file."""
    named = frozenset[str]().union(*front.http.key_to_models.values())
    for name in sorted(named - known):
        yield f"a key has 'models={name[:64]}', which is no first name of a model in {path}"


def _shared_paths(models: Sequence[ServedModel]) -> Iterator[str]:
    """Files and folders that the engine cores of two models would write."""
    path_to_use: dict[str, tuple[str, str]] = {}
    for entry, config in models:
        for key, path in _written_paths(config.engine):
            other, other_key = path_to_use.setdefault(os.path.realpath(path), (entry.name, key))
            if (other, other_key) != (entry.name, key):
                yield f"{entry.name}: its {key} {path[:256]} is the {other_key} of {other}, and one engine core uses it"


def _shared_names(models: Sequence[ServedModel]) -> Iterator[str]:
    """Adapters with the name of a model, or of an adapter of another one: a request could mean either."""
    name_to_owner = {name: entry.name for entry, config in models for name in config.served_model_names}
    for entry, config in models:
        for module in config.adapters.start_modules():
            owner = name_to_owner.setdefault(module.name, f"an adapter of {entry.name}")
            if owner != f"an adapter of {entry.name}":
                yield f"{entry.name}: the name of its adapter {module.name[:64]} is that of {owner}"


def _written_paths(engine: EngineArgs) -> Iterator[tuple[str, str]]:
    """The option and the path of each file and folder of a model's engine cores, as these name them."""
    for key, path in (("kv_cache_dir", engine.kv_cache_dir), ("record_steps", engine.record_steps)):
        if path is not None and engine.data_parallel_size > 1:
            yield from ((key, f"{path}.{index}") for index in range(engine.data_parallel_size))
        elif path is not None:
            yield key, path


def _conflicts(settings: Settings) -> Iterator[Problem]:
    for key, reason in {**_NEVER, **_NOT_FOR_ALL}.items():
        if settings.is_given(key):
            flag = next(one.option.declared.flag for one in settings.all() if one.option.key == key)
            yield Problem(f"{_FLAG} and {flag} exclude each other: {reason}")


def _entry_values(path: str, entry: ModelEntry) -> tuple[dict[str, object], list[str]]:
    """Keys of the options that the flags of a model give, with their values; and what is at fault."""
    faults = [f"{key}: {_NEVER[key]}" for key in sorted({name.replace("-", "_") for name in entry.flags} & {*_NEVER})]
    given = {
        flag_of(name, KEY_FLAGS): value for name, value in entry.flags.items() if name.replace("-", "_") not in _NEVER
    }
    if len(given) + len(faults) < len(entry.flags):
        faults.append("an option is set twice, under two spellings")
    file = ConfigFile(path, given, _FLAG)
    found = resolve(_ENTRY_OPTIONS, argparse.Namespace(), {}, file, ALL_FOREIGN_FLAGS)
    prefix = f"{_FLAG} {path}: "
    faults += [problem.removeprefix(prefix) for problem in found.problems]
    return {one.option.key: one.value for one in found.all() if found.is_given(one.option.key)}, faults
