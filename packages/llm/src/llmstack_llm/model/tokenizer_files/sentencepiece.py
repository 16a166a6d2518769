"""Conversion of a sentencepiece model, unigram or BPE."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from llmstack_gguf import bpe_model
from llmstack_llm.model.tokenizer_files.added import named_token
from llmstack_llm.model.tokenizer_files.parts import assembled, merges_of
from llmstack_llm.model.tokenizer_files.proto import (
    BYTE,
    CONTROL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
    read_model,
)
from llmstack_llm.model.tokenizer_files.source import ConversionError
from llmstack_types.json_values import JSONObject, JSONValue

_SPACE = "▁"
_OUTER_SPACES, _LAST_SPACES = r"\A +| +\z", r" +\z"
_COMPOSED = (("e\u0301", "é"), ("o\u0308", "ö"), ("\u0438\u0306", "\u0439"))


def convert_sentencepiece(
    content: bytes, config: Mapping[str, object], added: Mapping[int, str], added_special: frozenset[int]
) -> tuple[JSONObject, JSONObject]:
    """`tokenizer.json`, and what the file says of named tokens."""
    model = read_model(content)
    pieces = _extended(model, added)
    named = {
        f"{name}_token": model.pieces[index].text
        for name, index in (("bos", model.bos_id), ("eos", model.eos_id), ("unk", model.unk_id), ("pad", model.pad_id))
        if 0 <= index < len(model.pieces) and model.pieces[index].kind in (CONTROL, UNKNOWN)
    }
    special = {index for index, piece in enumerate(pieces) if piece.kind in (CONTROL, UNKNOWN)} | added_special
    own = {index: piece.text for index, piece in enumerate(pieces) if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED)}
    whole = {**named, **config}
    # Decoders of this kind get a first token unless their configuration says otherwise.
    first = named_token(whole, "bos_token") if config.get("add_bos_token", True) is True else None
    last = named_token(whole, "eos_token") if config.get("add_eos_token") is True else None
    parts = {**_cleaning(model), **_decoder(model), "model": _model(model, pieces)}
    if config.get("legacy") is False and model.add_dummy_prefix:
        parts |= _first_prefix(parts)
    return assembled(parts, own, frozenset(special), first, last), named


def _extended(model: SentencePieceModel, added: Mapping[int, str]) -> list[Piece]:
    """The pieces and, behind them, added tokens, whose ids must follow."""
    pieces = list(model.pieces)
    texts = {piece.text for piece in pieces}
    for token_id, content in sorted(added.items()):
        if token_id < len(model.pieces):
            if model.pieces[token_id].text != content:
                raise ConversionError(f"the added token {token_id} has another text in tokenizer.model")
            if model.pieces[token_id].kind not in (CONTROL, UNKNOWN):
                pieces[token_id] = Piece(content, model.pieces[token_id].score, USER_DEFINED)
            continue
        if token_id != len(pieces) or content in texts:
            raise ConversionError("the ids of added tokens do not follow those of tokenizer.model")
        texts.add(content)
        pieces.append(Piece(content, 0.0, USER_DEFINED))
    return pieces


def _cleaning(model: SentencePieceModel) -> dict[str, object]:
    steps: list[dict[str, object]] = []
    if model.charsmap:
        steps += _mapping(base64.b64encode(model.charsmap).decode())
    if model.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": _OUTER_SPACES}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    if model.remove_extra_whitespaces:  # also where the text itself has this character
        steps.append({"type": "Replace", "pattern": {"Regex": rf"{_SPACE}+\z"}, "content": ""})
    return {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}


def _mapping(charsmap: str) -> list[dict[str, object]]:
    """The steps of a map of characters.

    The library looks up clusters of at most 5 bytes as a whole, others character by character. So it composes less, and
    takes a line's end of two characters for one.
    """
    import tokenizers

    step = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    whole = assembled({"normalizer": step, "model": bpe_model({}, [])}, {}, frozenset(), None, None)
    try:
        normalizer = tokenizers.Tokenizer.from_str(json.dumps(whole)).normalizer
        joins_lines = normalizer.normalize_str("\r") == " "
        composes = all(normalizer.normalize_str(text) == composed for text, composed in _COMPOSED)
    except BaseException as error:  # the library raises bare Exception, and a panic is not even that
        raise ConversionError("tokenizer.model is damaged: its map of characters makes no tokenizer") from error
    steps: list[JSONObject] = [step]
    if joins_lines:
        steps.insert(0, {"type": "Replace", "pattern": {"String": "\r\n"}, "content": "  "})
    if composes:
        steps.append({"type": "NFC"})
    return steps


def _first_prefix(parts: Mapping[str, JSONValue]) -> dict[str, object]:
    """The space in front of the whole text only, not behind each special token (`legacy` false in transformers).

    Each text between special tokens is normalized alone. A space in front of it is its own, and stands for the prefix
    in front of the whole text.
    """
    steps = [step for step in parts["normalizer"]["normalizers"] if step["type"] != "Prepend"]
    for index, step in enumerate(steps):
        if step.get("pattern") == {"Regex": _OUTER_SPACES}:
            steps[index] = {**step, "pattern": {"Regex": _LAST_SPACES}}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False},
    }


def _decoder(model: SentencePieceModel) -> dict[str, object]:
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.add_dummy_prefix or model.remove_extra_whitespaces:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"decoder": {"type": "Sequence", "decoders": decoders}}


def _model(model: SentencePieceModel, pieces: list[Piece]) -> dict[str, object]:
    if model.model_type == UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": model.unk_id,
            "vocab": [[piece.text, _score(piece, pieces)] for piece in pieces],
            "byte_fallback": model.byte_fallback,
        }
    rank_of = {piece.text: -piece.score for piece in model.pieces if piece.kind not in (CONTROL, UNKNOWN, BYTE)}
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    return bpe_model(vocab, merges_of(rank_of)) | {
        "unk_token": model.pieces[model.unk_id].text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
    }


def _score(piece: Piece, pieces: list[Piece]) -> float:
    """Pieces that no text contains as such get a score at which no path takes them."""
    return piece.score if piece.kind not in (CONTROL, BYTE) else -1e9
