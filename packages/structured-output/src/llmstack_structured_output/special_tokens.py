"""Special tokens of a tokenizer, which never stand for their own text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

_BYTE_TOKEN_LENGTH = len("<0x0A>")


def hide_special_tokens(text: str) -> tuple[str, dict[str, int]]:
    """A `tokenizer.json` in which no text has the name of a special token, and the ids of these by their true names.

    llguidance 1.9.1 asks the tokenizer how to write a text that it forces. The tokenizer makes one special token of a
    literal such as `</s>`, which ends the text or is not allowed there. Under names that no text holds, the special
    tokens keep their ids, and literals are written in ordinary tokens.

    Raises:
        ValueError: It has another form.
    """
    tokenizer = json.loads(text)
    if not isinstance(tokenizer, dict):
        raise ValueError("expected an object")
    ids: dict[str, int] = {}
    names: dict[str, str] = {}
    secret = secrets.token_hex(8)
    for token in tokenizer.get("added_tokens") or []:
        name = token["content"]
        if _is_special(token):
            ids[name] = token["id"]
            names[name] = token["content"] = f"<{secret}-{token['id']}>"
    if isinstance(tokenizer.get("model"), dict):
        _rename(tokenizer["model"], names)
    return json.dumps(tokenizer), ids


def _is_special(token: Mapping[str, Any]) -> bool:
    """By the rule of llguidance, except for the tokens of single bytes, which the tokenizer needs by their names."""
    name = token["content"]
    is_tag = name.startswith("<") and name.endswith(">")
    is_byte = is_tag and name.startswith("<0x") and len(name) == _BYTE_TOKEN_LENGTH
    return (token.get("special") is True or is_tag) and not is_byte


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens in the vocabulary of a model. Pairs of which they consist must not be merged any longer."""
    vocab, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if merges:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges)
        model["merges"] = [
            merge for merge, (left, right) in pairs if names.keys().isdisjoint((left, right, left + right))
        ]
