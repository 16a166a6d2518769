"""Sampling defaults from `generation_config.json` and from options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from llmstack_types import LLMStackError

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
                      "forced_bos_token_id")  # fmt: skip
"""Keys of a model's own file that have an effect, as in vLLM."""
_NUMBERS = (
    *_SAMPLING_DEFAULTS,
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "max_tokens",
    "min_tokens",
    "seed",
)
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


class GenerationConfigError(LLMStackError, ValueError):
    """The option cannot be used; the text names it in one sentence."""


def read_generation_config(folder: Path) -> Mapping[str, object]:
    """The file of a model's folder; empty where it has none."""
    from llmstack_model_files import read_json

    return read_json(folder, FILE_NAME, required=False) or {}


def sampling_defaults(
    generation: Mapping[str, object], source: str, overrides: Mapping[str, object]
) -> dict[str, object]:
    """Field of `SamplingParams` to its default.

    `generation`: The model's own file.
    `source`: `auto` takes it, `vllm` takes nothing, and a folder takes its file.
    `overrides`: Keys of such a file, which win.

    Raises:
        GenerationConfigError: There is no such folder, or a key that is no sampling default.
    """
    found = _of_file(chosen_file(generation, source))
    if found:
        listed = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.warning(
            "%s sets sampling defaults: %s (generation_config=vllm ignores it)", _origin(generation, source), listed
        )
    return _renamed(found) | _renamed(_checked(overrides))


def _origin(generation: Mapping[str, object], source: str) -> str:
    """The source of the sampling defaults, for a line of the log."""
    if source != "auto":
        return f"the given {FILE_NAME}"
    name = generation.get("registered_name")  # the file of a GGUF model that is registered under a name
    return f"the registration of {name}" if isinstance(name, str) else f"the model's {FILE_NAME}"


def chosen_file(generation: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The keys of the file that counts; see `sampling_defaults` for the arguments and errors."""
    if source == "auto":
        return generation
    if source == "vllm":
        return {}
    folder = Path(source).expanduser()
    if not (folder / FILE_NAME).is_file():
        raise GenerationConfigError(
            f"generation_config {source[:256]!r}: expected 'auto', 'vllm' or a folder with a {FILE_NAME}"
        )
    return read_generation_config(folder)


def _of_file(generation: Mapping[str, object]) -> dict[str, object]:
    return {key: generation[key] for key in _SAMPLING_DEFAULTS if _is_number(generation.get(key))}


def _checked(overrides: Mapping[str, object]) -> dict[str, object]:
    for key, value in overrides.items():
        if key not in (*_NUMBERS, *_SWITCHES):
            known = ", ".join((*_NUMBERS, *_SWITCHES))
            raise GenerationConfigError(f"override_generation_config: {key[:64]!r} is none of {known}")
        if key in _SWITCHES and not isinstance(value, bool):
            raise GenerationConfigError(f"override_generation_config: {key} must be true or false")
        if key in _NUMBERS and not _is_number(value):
            raise GenerationConfigError(f"override_generation_config: {key} must be a number")
    if "max_tokens" in overrides and "max_new_tokens" in overrides:
        raise GenerationConfigError("override_generation_config: give max_tokens or max_new_tokens, not both")
    return dict(overrides)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _renamed(defaults: dict[str, object]) -> dict[str, object]:
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    return defaults
