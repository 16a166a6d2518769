"""Parts of `tokenizer.json` that the conversions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_gguf import bpe_model
from llmstack_llm.model.tokenizer_files.source import MAX_TOKENS, ConversionError
from llmstack_types.json_values import JSONObject

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def byte_level_parts(ranked: Sequence[bytes], first_id: int, pattern: str, *, composes: bool = False) -> JSONObject:
    """The parts of a byte-level BPE whose merges follow from the order of its tokens, as tiktoken has it."""
    texts = [_as_text(token) for token in ranked]
    if len(set(texts)) != len(texts):
        raise ConversionError("two tokens of the tokenizer are the same")
    rank_of = {text: rank for rank, text in enumerate(texts)}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _BYTES]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model({text: first_id + rank for text, rank in rank_of.items()}, merges_of(rank_of)) | {
            "ignore_merges": True
        },
    }  # fmt: skip


def merges_of(rank_of: Mapping[str, float]) -> list[list[str]]:
    """All pairs of tokens that make a token, the token of the lowest rank first."""
    merges: list[tuple[float, float, float, list[str]]] = []
    for token, rank in rank_of.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in rank_of and second in rank_of:
                merges.append((rank, rank_of[first], rank_of[second], [first, second]))
        if len(merges) > 16 * MAX_TOKENS:
            raise ConversionError("the tokenizer's tokens have too many pairs")
    merges.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in merges]


def assembled(
    parts: Mapping[str, object], added: Mapping[int, str], special: frozenset[int], first: str | None, last: str | None
) -> JSONObject:
    """The whole file; `first` and `last` are the tokens that every text gets."""
    entries = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in special,
        }
        for token_id, content in sorted(added.items())
    ]
    ids = {content: token_id for token_id, content in added.items()}
    ends = {name: ids[name] for name in (first, last) if name is not None and name in ids}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "post_processor": _template(first, last, ends) if ends else None,
        **parts,
    }


def _template(first: str | None, last: str | None, ends: Mapping[str, int]) -> JSONObject:
    def framed(sequence: str, type_id: int) -> list[JSONObject]:
        frame = [
            None if name not in ends else {"SpecialToken": {"id": name, "type_id": type_id}} for name in (first, last)
        ]
        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [entry for entry in (frame[0], text, frame[1]) if entry is not None]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": {name: {"id": name, "ids": [ids], "tokens": [name]} for name, ids in ends.items()},
    }


def _alphabet() -> list[str]:
    """GPT-2's character of each byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_ALPHABET = _alphabet()


def _as_text(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)
