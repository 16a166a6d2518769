"""The configuration of an adapter, as peft writes it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmstack_model_runner.adapters.patterns import (
    MAX_NAME_LENGTH,
    CostlyPatternError,
    Matches,
    PatternError,
    compile_pattern,
)

_MAX_ENTRIES = 4096
# Fields whose presence changes what the adapter computes, to what they stand for.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "lora_bias": "biases (lora_bias)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
# Fields that peft writes and that change nothing that is computed here, or that are read below.
_KNOWN = frozenset(
    {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
     "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
     "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
     "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
     "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora"}
)  # fmt: skip
# Initialisations that change the weights of the base model.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(ValueError):
    """An adapter cannot be served; the text is one sentence for a user."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank, scale and targets of an adapter.

    Attributes:
        rank: The rank of modules without a pattern.
        alpha: The alpha of modules without a pattern.
        is_stabilised: The scale is alpha / sqrt(rank), not alpha / rank (rsLoRA).
        ranks: Patterns with ranks of their own; the first that fits counts.
        alphas: Patterns with alphas of their own.
        is_target: Whether a module, by its name, may have an update.
        parameter_names: Ends of the names of parameters of experts that have one.
        is_parameter: Whether a parameter, by its name, is one of these.
        base_model: The model that it was trained on, as the file says.
        whole_names: Ends of the names of modules that are stored as a whole.
        is_whole: Whether a module, by its name, is one of these.
    """

    rank: int
    alpha: float
    is_stabilised: bool
    ranks: tuple[tuple[Matches, int], ...]
    alphas: tuple[tuple[Matches, float], ...]
    is_target: Matches
    parameter_names: tuple[str, ...]
    is_parameter: Matches
    base_model: str
    whole_names: tuple[str, ...]
    is_whole: Matches

    def rank_of(self, module: str) -> int:
        """Rank of a module's update."""
        return next((rank for matches, rank in self.ranks if matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of a module's update."""
        alpha = next((alpha for matches, alpha in self.alphas if matches(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_stabilised else rank)


def read_adapter_config(values: Mapping[str, Any]) -> AdapterConfig:
    """Checks a parsed adapter_config.json.

    Raises:
        AdapterError: It is not of a kind that is served, or a value is not possible.
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"The adapter is of the type {str(kind)[:32]!r}; only LORA is served.")
    for name, what in _REFUSED.items():
        if values.get(name):
            raise AdapterError(f"The adapter uses {what}, which is not supported.")
    unknown = next((name for name, value in values.items() if value and name not in _KNOWN), None)
    if unknown is not None:
        raise AdapterError(
            f"adapter_config.json has the field {unknown[:64]!r}, which is not known here and may change the adapter."
        )
    if values.get("bias") not in (None, "none"):
        raise AdapterError("The adapter has biases (bias), which are not supported.")
    start = str(values.get("init_lora_weights") or "").lower()
    if start.startswith(_CHANGED_BASES):
        raise AdapterError(
            f"The adapter belongs to a changed base model (init_lora_weights {start[:32]!r}); convert it with peft."
        )
    rank, alpha, whole_names = values.get("r"), values.get("lora_alpha"), _whole_names(values)
    parameters = _parameters(values)
    return AdapterConfig(
        rank=_rank(rank, "r"),
        alpha=_alpha(alpha, "lora_alpha"),
        is_stabilised=values.get("use_rslora") is True,
        ranks=tuple((matches, _rank(value, name)) for name, matches, value in _patterns(values, "rank_pattern")),
        alphas=tuple((matches, _alpha(value, name)) for name, matches, value in _patterns(values, "alpha_pattern")),
        is_target=_targets(values.get("target_modules"), is_needed=not parameters),
        parameter_names=tuple(parameters),
        is_parameter=_names(parameters),
        base_model=str(values.get("base_model_name_or_path") or "")[:1024],
        whole_names=tuple(whole_names),
        is_whole=_names(whole_names),
    )


def _rank(value: object, name: str) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise AdapterError(f"adapter_config.json: {name[:64]} must be a rank of at least 1, got {str(value)[:32]!r}.")
    return value


def _alpha(value: object, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise AdapterError(f"adapter_config.json: {name[:64]} must be a finite number, got {str(value)[:32]!r}.")


def _patterns(values: Mapping[str, Any], field: str) -> list[tuple[str, Matches, object]]:
    """Each pattern's name for messages, its test and its value; as in peft, a pattern fits the end of a name."""
    patterns = values.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_ENTRIES:
        raise AdapterError(f"adapter_config.json: {field} must be an object of at most {_MAX_ENTRIES} patterns.")
    return [(f"{field} {key[:32]}", _ends_with(key, field), value) for key, value in patterns.items()]


def _ends_with(pattern: str, field: str) -> Matches:
    plain = pattern.replace("\\.", ".")
    if plain.replace(".", "").replace("_", "").isalnum():
        return _names([plain])
    is_anchored = pattern.startswith("^")
    matches = _compiled(pattern.removeprefix("^").removesuffix("$"), field)
    if is_anchored:
        return matches
    return lambda name: any(matches(end) for end in _ends(name))


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _names(names: list[str]) -> Matches:
    suffixes = tuple(f".{name}" for name in names)
    known = frozenset(names)
    return lambda name: name in known or name.endswith(suffixes)


def _targets(value: object, *, is_needed: bool) -> Matches:
    """`is_needed`: Whether there are no other targets than these modules."""
    if not value and not is_needed:
        return lambda name: False
    if isinstance(value, str):
        if value == "all-linear":
            return lambda name: True
        try:
            return compile_pattern(value)
        except CostlyPatternError:
            return lambda name: True  # the tensors of the file say which modules it has
        except PatternError as error:
            raise AdapterError(f"adapter_config.json: target_modules {value[:64]!r} {error}.") from error
    names = _name_list(value)
    if not names:
        raise AdapterError("adapter_config.json: target_modules must be a list of names, or a regular expression.")
    return _names(names)


def _parameters(values: Mapping[str, Any]) -> list[str]:
    names = _name_list(values.get("target_parameters") or [])
    if names is None:
        raise AdapterError("adapter_config.json: target_parameters must be a list of names.")
    return names


def _whole_names(values: Mapping[str, Any]) -> list[str]:
    names = _name_list(values.get("modules_to_save") or [])
    if names is None:
        raise AdapterError("adapter_config.json: modules_to_save must be a list of names.")
    if names and values.get("ensure_weight_tying"):
        raise AdapterError("The adapter ties whole modules (ensure_weight_tying), which is not supported.")
    return names


def _name_list(value: object) -> list[str] | None:
    """A list of names, or None if it is none."""
    is_list = isinstance(value, list) and len(value) <= _MAX_ENTRIES
    if not is_list or not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH for name in value):  # type: ignore[attr-defined]  # it is a list
        return None
    return list(value)  # type: ignore[call-overload,no-any-return]  # it is a list of names


def _compiled(pattern: str, field: str) -> Matches:
    try:
        return compile_pattern(pattern)
    except PatternError as error:
        raise AdapterError(f"adapter_config.json: the pattern {pattern[:64]!r} of {field} {error}.") from error
