"""Draft tokens: what `--speculative-config` says, and what holds without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Methods of vLLM that need a model besides the served one, or layers of it that draft.
_DRAFT_METHODS = frozenset(
    {"custom_class", "dflash", "dspark", "draft_model", "eagle", "eagle3", "extract_hidden_states", "medusa",
     "mlp_speculator"}
)  # fmt: skip
SPECULATION_FLAGS: Mapping[str, str] = {
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-model": "model",
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
"""Flags of vLLM, the older ones too, to the key of the configuration that each sets."""
NO_DRAFTS = {"method": "none"}
NGRAM_MODEL = "[ngram]"
"""Older lines of vLLM name the method `ngram` so, in place of a draft model."""


def check_speculative_config(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a `SpeculativeConfig`, defaults included; the method `none`, which makes no drafts, as it is."""
    if value.get("model") == NGRAM_MODEL:
        value = {"method": "ngram"} | {name: entry for name, entry in value.items() if name != "model"}
    method = value.get("method", "draft_model" if value.get("model") else None)
    if value == NO_DRAFTS:
        return value
    if isinstance(method, str) and (method in _DRAFT_METHODS or method.endswith("mtp")):
        raise ValueError(f"draft models are not supported yet (method '{method[:64]}'); the method 'ngram' needs none")
    from llmstack_engine_core import SpeculativeConfig
    from llmstack_types.plain_data import from_plain, to_plain

    checked: Mapping[str, Any] = to_plain(from_plain(SpeculativeConfig, value))
    return checked


def _has_nvidia_device() -> bool:
    # Not `glob`: to import it takes 2 ms of every command line.
    return os.path.isdir("/dev") and any(name[:6] == "nvidia" and name[6:7].isdigit() for name in os.listdir("/dev"))


def runs_on_cpu(device: str) -> bool:
    """Whether the model runs on a CPU; False where a GPU may be used."""
    return device != "cuda" and not (device == "auto" and _has_nvidia_device())


def default_speculation(device: str) -> Mapping[str, Any] | None:
    """Drafts on a CPU, as far as they are expected to repay their cost; None where a GPU may be used.

    On a CPU a step of a few tokens takes hardly longer than one of one token. The engine core makes no drafts if they
    could change a bit of an answer.
    """
    if not runs_on_cpu(device):
        return None
    adaptive = {"is_adaptive": True, "needs_equal_bits": True}
    return check_speculative_config({"method": "ngram", "num_speculative_tokens": 6, **adaptive})
