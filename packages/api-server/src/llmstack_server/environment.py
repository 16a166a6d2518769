"""The environment variables that `llmstack serve` understands; nothing else in this package reads any."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# Name here to the names looked up, in order.
_NAMES = {
    "api_key": ("LLMSTACK_API_KEY", "VLLM_API_KEY"),
    "host": ("LLMSTACK_HOST", "VLLM_HOST_IP"),
    "port": ("LLMSTACK_PORT", "VLLM_PORT"),
    "log_level": ("LLMSTACK_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL"),
    "trace": ("LLMSTACK_TRACE",),
}
# Set by scripts out of habit and without a meaning here: not worth a warning.
_SILENT = frozenset({"VLLM_USE_V1", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"})


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, as text; None where it says nothing.

    Attributes:
        ignored: Names of `VLLM_*` variables that are set and not understood.
    """

    api_key: str | None = None
    host: str | None = None
    port: str | None = None
    log_level: str | None = None
    trace: str | None = None
    ignored: tuple[str, ...] = ()


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Picks the variables that matter out of `variables`; `LLMSTACK_*` comes before `VLLM_*`."""
    found = {
        field: next((variables[name] for name in names if variables.get(name)), None) for field, names in _NAMES.items()
    }
    understood = {name for names in _NAMES.values() for name in names} | _SILENT
    ignored = sorted(name for name in variables if name.startswith("VLLM_") and name not in understood)
    return Environment(ignored=tuple(ignored), **found)


def export_hub_settings(namespace: argparse.Namespace, variables: MutableMapping[str, str]) -> None:
    """Tells huggingface-hub what `--hf-token` and `--download-dir` say; before anything imports it."""
    if namespace.hf_token:
        variables["HF_TOKEN"] = namespace.hf_token
    if namespace.download_dir is not None:
        variables["HF_HUB_CACHE"] = namespace.download_dir
