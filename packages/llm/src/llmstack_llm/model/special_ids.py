"""Ids of special tokens, which configurations write as numbers or as texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmstack_llm.model.config import ModelConfig
    from llmstack_llm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_IDS = 64


def special_ids(
    key: str, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_path: Path | None
) -> tuple[int, ...]:
    """The ids under `key`, of `generation_config.json` or else of `config.json`: one, a list, or none.

    A text is a number or the content of a token, which `tokenizer.json` has.
    """
    found = generation.get(key, config.get(key))
    values = found[:_MAX_IDS] if isinstance(found, list) else [found]
    contents = [value for value in values if isinstance(value, str) and not _is_number(value)]
    known = _ids_of(contents, tokenizer_path) if contents else {}
    return tuple(dict.fromkeys(_resolved(key, values, known)))


def eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a completion: those of the model, and the one of its tokenizer."""
    eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
    found = (*model_config.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,)))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id < model_config.vocab_size))


def start_token_id(model_config: ModelConfig, tokenizer: Tokenizer | None) -> int | None:
    """The id with which an empty prompt starts; None where the model has none."""
    named = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    found = (*named, model_config.bos_token_id, *model_config.eos_token_ids)
    return next((token_id for token_id in found if token_id is not None), None)


def _resolved(key: str, values: list[Any], known: Mapping[str, int]) -> Iterator[int]:
    for value in values:
        if type(value) is int and value >= 0:
            yield value
        elif isinstance(value, str) and _is_number(value):
            yield int(value)
        elif isinstance(value, str) and value in known:
            yield known[value]
        elif isinstance(value, str):
            logger.warning("%s: the tokenizer has no token %r, so it is left out", key, value[:64])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _ids_of(contents: list[str], tokenizer_path: Path | None) -> dict[str, int]:
    from llmstack_model_files import read_json

    found = None if tokenizer_path is None else read_json(tokenizer_path, "tokenizer.json", required=False)
    if found is None:
        return {}
    model = found.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = {text: vocab.get(text) for text in contents} if isinstance(vocab, dict) else {}
    added = found.get("added_tokens")
    ids |= {
        str(entry.get("content")): entry.get("id")
        for entry in (added if isinstance(added, list) else ())
        if isinstance(entry, dict) and entry.get("content") in contents
    }
    return {text: token_id for text, token_id in ids.items() if type(token_id) is int}
