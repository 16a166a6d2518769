"""Environment variables that no option declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

from llmstack_llm.options.option import ENVIRONMENT_PREFIX, Option
from llmstack_llm.options.resolve import Settings

# Set by scripts out of habit, without a meaning here: not worth a warning.
_SILENT = frozenset({"VLLM_USE_V1", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"})
# Read by other programs of the stack.
_OTHERS = (f"{ENVIRONMENT_PREFIX}KERNELS", f"{ENVIRONMENT_PREFIX}BENCH_")


def ignored_variables(variables: Iterable[str], options: Iterable[Option]) -> list[str]:
    """Variables of vLLM or of this server that no option reads."""
    known = {name for option in options for name in option.variables} | _SILENT
    return sorted(
        name
        for name in variables
        if name.startswith(("VLLM_", ENVIRONMENT_PREFIX)) and name not in known and not name.startswith(_OTHERS)
    )


def export_hub_settings(settings: Settings, variables: MutableMapping[str, str]) -> None:
    """Sets the variables of huggingface-hub that `--hf-token` and `--download-dir` replace; before it is imported."""
    hub: Mapping[str, str | None] = {"HF_TOKEN": settings["hf_token"], "HF_HUB_CACHE": settings["download_dir"]}
    variables.update({name: value for name, value in hub.items() if value})
