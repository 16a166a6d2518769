"""Ids of special tokens, which configurations write as numbers or as texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_IDS = 64


def special_ids(
    key: str, generation: Mapping[str, object], config: Mapping[str, object], tokenizer_path: Path | None
) -> tuple[int, ...]:
    """The ids under `key`, of `generation_config.json` or else of `config.json`: one, a list, or none.

    A text is a number or the content of a token, which `tokenizer.json` has.
    """
    found = generation.get(key, config.get(key))
    values = found[:_MAX_IDS] if isinstance(found, list) else [found]
    contents = [value for value in values if isinstance(value, str) and not _is_number(value)]
    known = _ids_of(contents, tokenizer_path) if contents else {}
    return tuple(dict.fromkeys(_resolved(key, values, known)))


def _resolved(key: str, values: list[object], known: Mapping[str, int]) -> Iterator[int]:
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
