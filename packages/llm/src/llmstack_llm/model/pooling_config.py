"""Pooling of hidden states, from the files of sentence-transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmstack_types import LLMStackError, PoolingType

_MODE_TO_TYPE: Mapping[str, PoolingType] = {
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_max_tokens": PoolingType.MAX,
    "pooling_mode_weightedmean_tokens": PoolingType.WEIGHTED_MEAN,
}
# The same in one field, as newer versions write it.
_WORD_TO_MODE: Mapping[str, str] = {
    "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
}  # fmt: skip


class PoolingConfigError(LLMStackError, ValueError):
    """The folder asks for a way of pooling that there is not; the text names the file and the field."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The pooling of the model's folder; None for values that it does not have.

    Attributes:
        prompts: Prompts that precede texts, by the names of their purposes.
        of_tokens: Whether the model was trained for a vector of each token.
        max_seq_length: The longest prompt that the model was trained for, which may be less than it has positions for.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    of_tokens: bool = False


def load_pooling_config(folder: Path) -> PoolingConfig:
    """Reads `modules.json` and what it names, and two more files beside it; none of them has to be there.

    Raises:
        PoolingConfigError: A module or a mode of pooling is not supported.
        ModelFilesError: A file cannot be read.
    """
    from llmstack_model_files import ModelFilesError, read_json, read_modules

    try:
        modules = read_modules(folder)
    except ModelFilesError as error:
        raise PoolingConfigError(str(error).removesuffix(".")) from error
    if modules is None:
        return PoolingConfig()
    pooling_type = None
    if modules.pooling is not None:
        name = f"{modules.pooling}/config.json"
        pooling_type = _pooling_type(read_json(folder, name), name)
    lengths = read_json(folder, "sentence_bert_config.json", required=False) or {}
    length = lengths.get("max_seq_length")
    max_seq_length = length if type(length) is int and length > 0 else None
    return PoolingConfig(pooling_type, modules.normalizes, max_seq_length, _prompts(folder), modules.of_tokens)


def _prompts(folder: Path) -> dict[str, str]:
    from llmstack_model_files import read_json

    named = (read_json(folder, "config_sentence_transformers.json", required=False) or {}).get("prompts")
    items = named.items() if isinstance(named, Mapping) else ()
    return {str(name): text for name, text in items if isinstance(text, str)}


def override_pooling_config(found: PoolingConfig, asked: Mapping[str, object]) -> PoolingConfig:
    """The configuration of the folder, overridden by a `pooler_config` of vLLM's form.

    Raises:
        PoolingConfigError: A field or a way of pooling that there is not.
    """
    changes: dict[str, Any] = {}
    for name, value in asked.items():
        if name in ("pooling_type", "seq_pooling_type"):
            changes["pooling_type"] = _named_type(name, value)
        elif name in ("normalize", "use_activation"):
            if type(value) is not bool:
                raise PoolingConfigError(f"pooler_config: {name} must be true or false")
            changes["normalize"] = value
        else:
            raise PoolingConfigError(f"pooler_config: there is no {name[:64]!r}; pooling_type and normalize can be set")
    return dataclasses.replace(found, **changes)


def _named_type(name: str, value: object) -> PoolingType:
    try:
        return PoolingType(str(value).lower())
    except ValueError:
        listed = ", ".join(PoolingType)
        raise PoolingConfigError(f"pooler_config: {name} {str(value)[:64]!r} is none of {listed}") from None


def _pooling_type(config: Mapping[str, object], name: str) -> PoolingType:
    if config.get("include_prompt") is False:
        raise PoolingConfigError(f"{name}: include_prompt false is not supported, which pools texts without prompts")
    modes = [mode for mode, value in config.items() if mode.startswith("pooling_mode_") and value is True]
    word = config.get("pooling_mode")
    if isinstance(word, str):
        modes = [_WORD_TO_MODE.get(word, f"pooling_mode {word}")]
    if len(modes) != 1 or modes[0] not in _MODE_TO_TYPE:
        listed = ", ".join(mode[:64] for mode in modes[:4]) or "none"
        raise PoolingConfigError(
            f"{name}: one of {', '.join(_MODE_TO_TYPE)} must be true, and no other; found {listed}"
        )
    return _MODE_TO_TYPE[modes[0]]
