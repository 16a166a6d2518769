"""Options of the weights, settings and adapters that a reload may choose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.options import option, option_group

if TYPE_CHECKING:
    from llmstack_llm import EngineArgs
    from llmstack_server.options.process_options import ProcessConfig

# What the server has begun with.
START_NAME: Final = "start"
MAX_NUM_ENTRIES: Final = 64
SETTINGS: Final = (
    "dtype", "enable_prefix_caching", "generation_config", "gguf_activations", "hf_overrides", "kv_cache_dtype",
    "kv_cache_memory_bytes", "max_model_len", "num_host_blocks", "num_kv_blocks", "override_generation_config",
    "quantization", "revision", "seed",
)  # fmt: skip
"""Options of an engine that an entry may change; the others are known to more than the engine core."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ReloadEntry(NamedTuple):
    """An entry of `--reload-models`: what a reload by this name changes.

    Attributes:
        model: Folder or repository id; None for that of the start.
        settings: Keyword of an engine's option to its value.
        adapters: Names and paths of the adapters; None keeps those that there are.
    """

    name: str
    model: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    adapters: tuple[tuple[str, str], ...] | None = None

    @property
    def changes_adapters_alone(self) -> bool:
        """Whether the engine core can stay."""
        return self.model is None and not self.settings and self.adapters is not None


def check_entries(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Each is `name=model`, or a JSON object, and no name comes twice."""
    if len(texts) > MAX_NUM_ENTRIES:
        raise ValueError(f"{len(texts)} are given, and {MAX_NUM_ENTRIES} is the limit")
    names = [read_entry(text).name for text in texts]
    if len({*names, START_NAME}) != len(names) + 1:
        raise ValueError(f"a name is given twice, or it is {START_NAME!r}, which names what the server begins with")
    return texts


def read_entry(text: str) -> ReloadEntry:
    """The entry that `name=model` or `{"name": ..., "model": ..., "lora_modules": {...}, ...}` describes.

    Raises:
        ValueError: It has another form.
    """
    if not text.startswith("{"):
        name, _, model = text.partition("=")
        if not (_NAME.fullmatch(name) and model):
            raise ValueError(f"{text[:64]!r} is neither name=model nor a JSON object with a name")
        return ReloadEntry(name, model)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:64]!r} is not valid JSON") from None
    name, model, adapters = (values.pop(key, None) for key in ("name", "model", "lora_modules"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{text[:64]!r} has no name of 1 to 64 letters, digits, dots, dashes or underscores")
    if model is not None and not (isinstance(model, str) and model):
        raise ValueError(f"the model of {name} must be a text")
    if unknown := sorted({*values} - {*SETTINGS}):
        raise ValueError(f"{name} has {unknown[0][:64]!r}, which needs a restart; it may have {', '.join(SETTINGS)}")
    if adapters is None:
        return ReloadEntry(name, model, values)
    if not isinstance(adapters, dict) or not all(isinstance(path, str) and path for path in adapters.values()):
        raise ValueError(f"lora_modules of {name} must be an object of names and paths")
    return ReloadEntry(name, model, values, tuple(adapters.items()))


def engine_args_of(
    entry: ReloadEntry, engine: EngineArgs, start_model_path: str, model_path: str | None = None
) -> EngineArgs:
    """The options of the engine cores that serve an entry.

    `engine`: The options of the start, except the model's folder.
    `model_path`: The folder of the entry's model; None finds it.

    Raises:
        ModelFilesError: The model cannot be found.
        EngineArgsError: Its settings contradict each other.
    """
    from llmstack_model_files import resolve_model

    changes = dict(entry.settings)
    if model_path is None and entry.model is not None:
        changed = replace(engine, **changes)
        model_path = str(resolve_model(entry.model, changed.revision, form=changed.file_form))
    if entry.model is not None:
        changes["mmproj"] = None  # it belongs to the model of the start
    return replace(engine, **changes, model=model_path or start_model_path, weights_name=entry.name)


@option_group
class ReloadOptions(OptionGroup):
    """Models and adapters that operators may load while the server runs."""

    title = "Reload"

    reload_models: tuple[str, ...] = option(
        (),
        check=check_entries,
        metavar="NAME=MODEL",
        help="weights, settings and adapters that POST /v1/reload may choose by their names: name=model, or JSON with "
        "name, model, lora_modules and options of the engine",
        example='{"name": "next", "model": "/models/next", "max_model_len": 2048}',
    )

    weight_update_dir: str | None = option(
        None,
        metavar="DIR",
        help="folder below which POST /update_weights takes weights of the served model from a trainer, in place",
        example="/var/lib/trainer/weights",
    )

    @property
    def changes_weights(self) -> bool:
        """Whether other weights may come to answer than those of the start."""
        return bool(self.reload_models) or self.weight_update_dir is not None

    @property
    def entries(self) -> Mapping[str, ReloadEntry]:
        """Name to entry, with that of the start."""
        found = [ReloadEntry(START_NAME), *map(read_entry, self.reload_models)]
        return {entry.name: entry for entry in found} if self.reload_models else {}

    def conflicts_with(self, engine: EngineArgs, processes: ProcessConfig) -> Iterator[Problem]:
        """Contradictions with a second engine core beside the first one, and with a change in place."""
        yield from self._conflicts_of_updates(engine, processes)
        if not self.reload_models:
            return
        flag = "{reload_models}"
        for name, is_given, reason in (
            ("engine_addresses", processes.is_attached, "another program runs the engine cores"),
            ("is_headless", processes.is_headless and not engine.has_other_hosts, "headless serves no HTTP"),
            ("is_multiprocess", not processes.is_multiprocess, "the engine core has no process of its own"),
            ("data_parallel_backend", engine.data_parallel_backend == "ray", "Ray has no place for both"),
            ("num_api_servers", engine.has_other_hosts and processes.num_api_servers > 1, "they share other machines"),
            ("distributed_executor_backend", engine.num_nodes > 1, "ranks of other machines cannot be exchanged"),
            ("record_steps", engine.record_steps is not None, "two processes would write one file"),
            ("kv_events_config", bool(engine.kv_events_config), "two processes would publish at one port"),
            ("kv_cache_dir", engine.kv_cache_dir is not None, "two processes would use one folder"),
            ("kv_transfer_config", bool(engine.kv_transfer_config), "two processes would have one name"),
        ):
            if is_given:
                yield Problem(f"{flag} and {{{name}}} exclude each other: {reason}")
        if not engine.max_engine_restarts:
            yield Problem(f"{flag} needs {{max_engine_restarts}} of at least 1: the journal of requests comes with it")
        if any(read_entry(text).adapters is not None for text in self.reload_models) and not engine.enable_lora:
            yield Problem(f"{flag} with lora_modules needs {{enable_lora}}")

    def _conflicts_of_updates(self, engine: EngineArgs, processes: ProcessConfig) -> Iterator[Problem]:
        if self.weight_update_dir is None:
            return
        flag = "{weight_update_dir}"
        for name, is_given, reason in (
            ("reload_models", bool(self.reload_models), "a reload knows no weights that were changed in place"),
            ("engine_addresses", processes.is_attached, "another program runs the engine cores"),
            ("is_headless", processes.is_headless, "headless serves no HTTP"),
            ("num_api_servers", processes.num_api_servers > 1, "one process follows the weights"),
            ("data_parallel_size", engine.data_parallel_size > 1, "one engine core would change before the others"),
        ):
            if is_given:
                yield Problem(f"{flag} and {{{name}}} exclude each other: {reason}")
