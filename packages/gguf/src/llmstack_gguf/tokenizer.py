"""Tokenizer of a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

Byte-level BPE has its merges in the file. A sentencepiece model has scores instead, from which merges follow: two
pieces are merged in the order of the scores of what they make. That of Gemma 4 has pieces and merges.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmstack_gguf.header import GGUFError, Value
from llmstack_gguf.pre_tokenizers import COMPOSES, IGNORES_MERGES, PRE_TOKENIZERS

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_END_TOKENS = frozenset(
    (
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>",
        "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>",
        "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip
_MAX_TOKENS = 1 << 20
_MAX_PIECE_CHARACTERS = 256
"""Splits of a longer piece are not searched: their number, times its length, is work that a file could demand."""
_MAX_SPLITS = 1 << 24
"""Of all pieces; 262,144 pieces of Gemma have 2 million."""
_MAX_MERGES = 1 << 21
"""That follow from pieces; those of Gemma have 600,000."""


_Merges = Callable[[Sequence[str], Sequence[float], Sequence[float]], list[list[str]]]


def tokenizer_files(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """Contents of `tokenizer.json` and `tokenizer_config.json`, by name.

    Raises:
        GGUFError: The file has no tokenizer, or one of a kind that is not supported.
    """
    tokens = _tokens(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, _merges_of)
    elif kind == "gemma4":
        parts = _sentencepiece(metadata, tokens, lambda *_: _merges_in(metadata))
    else:
        raise GGUFError(f"its tokenizer is of the kind {str(kind)[:64]!r}; gpt2, llama and gemma4 are supported.")
    named = {
        name: tokens[token_id]
        for name in ("bos", "eos", "unk", "pad")
        if (token_id := special_id(metadata, name)) is not None and token_id < len(tokens)
    }
    config: dict[str, Any] = {f"{name}_token": token for name, token in named.items() if name != "pad"}
    if "pad" in named:
        config["pad_token"] = named["pad"]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    first = tokens.index(named["bos"]) if _adds_bos(metadata, kind) and "bos" in named else None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, tokens),
        "post_processor": None if first is None else _template(named["bos"], first),
        **parts,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def special_id(metadata: Mapping[str, Value], name: str) -> int | None:
    """The id of a special token: `bos`, `eos`, `eot`, `unk` or `pad`."""
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    found = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return found if type(found) is int else None


def end_ids(metadata: Mapping[str, Value]) -> list[int]:
    """The ids of tokens that end an answer: those that the file names, and special ones with such a text.

    Files name few of them, so llama.cpp goes by the text too. A model that was trained on several may end with any.
    """
    named = [special_id(metadata, name) for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    found: dict[str, int] = {}
    if isinstance(tokens, list) and isinstance(kinds, array):
        found = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind in (_CONTROL, _USER_DEFINED) and token in _END_TOKENS
        }
    if "<|return|>" in found and "<|call|>" in found:  # the format of gpt-oss, where it ends one message of several
        found.pop("<|end|>", None)
    return list(dict.fromkeys(token_id for token_id in (*named, *found.values()) if token_id is not None))


def _tokens(metadata: Mapping[str, Value]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
        raise GGUFError("it has no tokenizer.")
    if len(set(tokens)) != len(tokens):
        raise GGUFError("two tokens of its tokenizer are the same.")
    return tokens


def _adds_bos(metadata: Mapping[str, Value], kind: Value) -> bool:
    found = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(found, bool):
        return found
    return kind == "llama" or metadata.get("tokenizer.ggml.pre") in IGNORES_MERGES


def _added(metadata: Mapping[str, Value], tokens: Sequence[str]) -> list[dict[str, Any]]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise GGUFError("its tokenizer does not say which tokens are special.")
    unknown = special_id(metadata, "unk")
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL or token_id == unknown,
        }
        for token_id, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED) or token_id == unknown
    ]


def _template(token: str, token_id: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _byte_level(metadata: Mapping[str, Value], tokens: Sequence[str]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS or not isinstance(name, str):
        raise GGUFError(f"its tokenizer cuts texts by the rules {str(name)[:64]!r}, which are not supported.")
    return {
        "normalizer": {"type": "NFC"} if name in COMPOSES else None,
        "pre_tokenizer": PRE_TOKENIZERS[name],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model(_vocab_of(tokens), _merges_in(metadata), ignore_merges=name in IGNORES_MERGES),
    }


def _merges_in(metadata: Mapping[str, Value]) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise GGUFError("its tokenizer has no merges.")
    return [_pair(merge) for merge in merges]


def _pair(merge: str) -> list[str]:
    # A piece may contain a space only in files of foreign make; the first one inside separates then.
    first, separator, second = merge.partition(" ")
    if not separator or not first or not second:
        raise GGUFError("a merge of its tokenizer is no pair.")
    return [first, second]


def _sentencepiece(metadata: Mapping[str, Value], tokens: Sequence[str], merges_of: _Merges) -> dict[str, Any]:
    scores, kinds = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(scores, array) or not isinstance(kinds, array) or not len(scores) == len(kinds) == len(tokens):
        raise GGUFError("its tokenizer has no score for each token.")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = special_id(metadata, "unk")
    has_unknown = unknown is not None and unknown < len(tokens)
    model = bpe_model(_vocab_of(tokens), merges_of(tokens, scores, kinds))
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": tokens[unknown or 0] if has_unknown else None}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_of(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[float]) -> list[list[str]]:
    """All pairs of pieces that make a piece, the piece of the highest score first.

    Raises:
        GGUFError: They are more than a tokenizer has.
    """
    piece_to_id = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if kinds[token_id] not in (_CONTROL, _BYTE) and len(token) <= _MAX_PIECE_CHARACTERS
    }
    if sum(map(len, piece_to_id)) > _MAX_SPLITS:
        raise GGUFError(f"the pieces of its tokenizer have more than {_MAX_SPLITS} characters.")
    merges: list[tuple[float, int, int, list[str]]] = []
    for piece, token_id in piece_to_id.items():
        for cut in range(1, len(piece)):
            first, second = piece[:cut], piece[cut:]
            if first in piece_to_id and second in piece_to_id:
                merges.append((-scores[token_id], piece_to_id[first], piece_to_id[second], [first, second]))
        if len(merges) > _MAX_MERGES:
            raise GGUFError(f"the pieces of its tokenizer make more than {_MAX_MERGES} merges.")
    merges.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in merges]


def _vocab_of(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def bpe_model(vocab: Mapping[str, int], merges: list[list[str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    """The model of a BPE as in tokenizer.json. `vocab`: Token to its id."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocab),
        "merges": merges,
    }
