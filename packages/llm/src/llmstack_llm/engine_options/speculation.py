"""Draft tokens: what `--speculative-config` says, and what holds without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

# Methods of vLLM that are not built.
_OTHER_METHODS = frozenset({"custom_class", "dspark", "extract_hidden_states", "mlp_speculator"})
_OWN_HEADS = frozenset({"eagle", "eagle3", "medusa", "dflash"})
"""Methods by heads with a checkpoint of their own, which read the served model's hidden states."""
_HEAD_METHODS = frozenset(
    {"mtp", "deepseek_mtp", "ernie_mtp", "glm4_moe_mtp", "mimo_mtp", "nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp"}
)
"""Names of the method `mtp`, by which a layer of the served checkpoint guesses; vLLM has one for each family."""
DEFAULT_NUM_DRAFTS = 5
"""Most drafts of one row by a draft model, where the line does not say."""
_DEFAULT_DEPTH, _MAX_NUM_DRAFTS = 24, 64
"""Of a `SpeculativeConfig`, which a command line does not import for every start."""
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


def check_speculative_config(value: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a `SpeculativeConfig`, defaults included; the method `none`, which makes no drafts, as it is.

    Of a draft model, `revision` and `max_model_len` are those of `DraftModelOptions`. `is_adaptive` is left open where
    it is not given, except for n-grams.
    """
    if value.get("model") == NGRAM_MODEL:
        value = {"method": "ngram"} | {name: entry for name, entry in value.items() if name != "model"}
    if value == NO_DRAFTS:
        return value
    from llmstack_engine_core import SpeculativeConfig
    from llmstack_types.plain_data import from_plain, to_plain

    if "method" not in value and value.get("model"):
        value = {"method": "draft_model", **value}
    method = value.get("method")
    if isinstance(method, str) and method in _HEAD_METHODS:
        # One layer guesses one token; more follow where it is asked again.
        method, value = "mtp", {"num_speculative_tokens": 1, **value, "method": "mtp"}
    elif isinstance(method, str) and (method in _OTHER_METHODS or method.endswith("mtp")):
        raise ValueError(
            f"drafts of the method '{method[:64]}' are not supported yet; the method 'draft_model' takes any served "
            "decoder as 'model', and the method 'ngram' needs none"
        )
    if method not in {"draft_model", "mtp", "suffix", *_OWN_HEADS}:
        checked: Mapping[str, object] = to_plain(from_plain(SpeculativeConfig, value))
        return checked
    own = {name: entry for name, entry in value.items() if name in _DRAFT_MODEL_KEYS}
    if method in ("mtp", "suffix") and (not_its := own.keys() - _WITHOUT_EFFECT):
        raise ValueError(f"{min(not_its)} is that of a draft model; the method '{method}' has none")
    options = to_plain(from_plain(DraftModelOptions, own))
    served = {"model": value["model"]} if method == "mtp" and value.get("model") else {}  # some lines repeat it
    others = {name: entry for name, entry in value.items() if name not in _DRAFT_MODEL_KEYS and name not in served}
    drafts = to_plain(
        from_plain(SpeculativeConfig, {"num_speculative_tokens": _default_num_drafts(method, value), **others})
    )
    if "is_adaptive" not in value:
        del drafts["is_adaptive"]
    return {**drafts, **{name: entry for name, entry in options.items() if name in own}, **served}


def _default_num_drafts(method: str, value: Mapping[str, object]) -> int:
    """Most drafts of a row where the line does not say; counts bound those of the method `suffix`, not a number."""
    depth = value.get("suffix_decoding_max_tree_depth", _DEFAULT_DEPTH)
    return max(1, min(depth, _MAX_NUM_DRAFTS)) if method == "suffix" and type(depth) is int else DEFAULT_NUM_DRAFTS


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """The fields of `--speculative-config` about a draft model, under vLLM's names.

    Attributes:
        revision: Of its repository; None for the main branch.
        max_model_len: The longest request that it makes drafts for; None is what its positions allow.
        draft_tensor_parallel_size: Ranks that share it; it runs on one.
        quantization: How its weights are rounded; those of its checkpoint stay as they are.
        attention_backend: Has no effect: kernels are chosen for the machine.
        moe_backend: The same.

    Raises:
        ValueError: A field is out of range; the text names it.
    """

    revision: str | None = None
    max_model_len: int | None = None
    draft_tensor_parallel_size: int = 1
    quantization: str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {self.max_model_len}")
        if self.draft_tensor_parallel_size != 1:
            raise ValueError(
                f"draft_tensor_parallel_size must be 1, got {self.draft_tensor_parallel_size}: one rank has the draft "
                "model and tells the others"
            )
        if self.quantization is not None:
            raise ValueError("quantization must be null: a draft model has the precision of its checkpoint")


_DRAFT_MODEL_KEYS = frozenset(field.name for field in fields(DraftModelOptions))
_WITHOUT_EFFECT = frozenset({"draft_tensor_parallel_size", "attention_backend", "moe_backend"})


def draft_head_of(speculative: Mapping[str, object] | None) -> str:
    """`draft_head` of a `ModelRunnerConfig`: the method, where it reads hidden states; empty for the others."""
    method = "" if speculative is None else str(speculative["method"])
    return method if method == "mtp" or method in _OWN_HEADS else ""


def of_scheduler(speculative: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of a checked `--speculative-config` that the scheduler receives."""
    without = {*_DRAFT_MODEL_KEYS, *(["model"] if speculative["method"] == "mtp" else [])}
    return {name: entry for name, entry in speculative.items() if name not in without}


def _has_nvidia_device() -> bool:
    # Not `glob`: to import it takes 2 ms of every command line.
    return os.path.isdir("/dev") and any(name[:6] == "nvidia" and name[6:7].isdigit() for name in os.listdir("/dev"))


def runs_on_cpu(device: str) -> bool:
    """Whether the model runs on a CPU; False where a GPU may be used."""
    return device != "cuda" and not (device == "auto" and _has_nvidia_device())


def default_speculation(device: str) -> Mapping[str, object] | None:
    """Drafts on a CPU, as far as they are expected to repay their cost; None where a GPU may be used.

    On a CPU a step of a few tokens takes hardly longer than one of one token. The engine core makes no drafts if they
    could change a bit of an answer.
    """
    if not runs_on_cpu(device):
        return None
    adaptive = {"is_adaptive": True, "needs_equal_bits": True}
    return check_speculative_config({"method": "ngram", "num_speculative_tokens": 6, **adaptive})
