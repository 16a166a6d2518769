"""Reader of the parts of sentencepiece's ModelProto that a conversion needs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from llmstack_llm.model.tokenizer_files.source import MAX_TOKEN_BYTES, MAX_TOKENS, ConversionError

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
BYTE: Final = 6
UNIGRAM: Final = 1
BPE: Final = 2
_KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

_Value: TypeAlias = int | bytes


@dataclass(slots=True)
class Piece:
    """One token; `kind` is the enumeration of the format."""

    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass(slots=True)
class SentencePieceModel:
    """The content of a file, with the format's defaults."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    is_whitespace_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_model(content: bytes) -> SentencePieceModel:
    """Reads a file.

    Raises:
        ConversionError: It is damaged, or beyond a limit.
    """
    model = SentencePieceModel()
    for number, value in _fields(content):
        match number, value:
            case 1, bytes():
                if len(model.pieces) == MAX_TOKENS:
                    raise ConversionError(f"tokenizer.model has more than {MAX_TOKENS} pieces")
                model.pieces.append(_piece(value))
            case 2, bytes():
                _read_trainer(model, value)
            case 3, bytes():
                _read_normalizer(model, value)
    _check(model)
    return model


def _piece(content: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(content):
        match number, value:
            case 1, bytes():
                if len(value) > MAX_TOKEN_BYTES:
                    raise ConversionError(f"tokenizer.model has a piece of more than {MAX_TOKEN_BYTES} bytes")
                try:
                    piece.text = value.decode()
                except UnicodeDecodeError as error:
                    raise ConversionError("tokenizer.model has a piece that is no text") from error
            case 2, bytes():
                if len(value) != 4:
                    raise ConversionError("tokenizer.model has a score that is no number")
                (piece.score,) = struct.unpack("<f", value)
            case 3, int():
                piece.kind = value
    return piece


def _read_trainer(model: SentencePieceModel, content: bytes) -> None:
    for number, value in _fields(content):
        if not isinstance(value, int):
            continue
        match number:
            case 3:
                model.model_type = value
            case 24:
                model.is_whitespace_suffix = bool(value)
            case 35:
                model.byte_fallback = bool(value)
            case 40:
                model.unk_id = _signed(value)
            case 41:
                model.bos_id = _signed(value)
            case 42:
                model.eos_id = _signed(value)
            case 43:
                model.pad_id = _signed(value)


def _read_normalizer(model: SentencePieceModel, content: bytes) -> None:
    for number, value in _fields(content):
        match number, value:
            case 2, bytes():
                model.charsmap = value
            case 3, int():
                model.add_dummy_prefix = bool(value)
            case 4, int():
                model.remove_extra_whitespaces = bool(value)
            case 5, int():
                model.escape_whitespaces = bool(value)


def _check(model: SentencePieceModel) -> None:
    if not model.pieces:
        raise ConversionError("tokenizer.model has no pieces")
    if model.model_type not in (UNIGRAM, BPE):
        raise ConversionError("tokenizer.model is of the kind word or char; unigram and BPE are supported")
    if model.is_whitespace_suffix or not model.escape_whitespaces:
        raise ConversionError("tokenizer.model puts spaces behind words or keeps them, which is not supported")
    kinds = {piece.kind for piece in model.pieces}
    if not kinds <= set(_KINDS):
        raise ConversionError("tokenizer.model has pieces that are marked as unused, which is not supported")
    if len({piece.text for piece in model.pieces}) != len(model.pieces):
        raise ConversionError("two pieces of tokenizer.model are the same")
    if not all(piece.text for piece in model.pieces):
        raise ConversionError("a piece of tokenizer.model is empty")
    if any(piece.score != piece.score or abs(piece.score) == float("inf") for piece in model.pieces):
        raise ConversionError("tokenizer.model has a score that is NaN or infinite")
    if not 0 <= model.unk_id < len(model.pieces) or model.pieces[model.unk_id].kind != UNKNOWN:
        raise ConversionError("tokenizer.model has no piece for what is unknown")


def _fields(content: bytes) -> Iterator[tuple[int, _Value]]:
    """Number and value of each field of a message; fixed sizes come as bytes. Groups are not in this format."""
    position = 0
    while position < len(content):
        key, position = _varint(content, position)
        wire_type = key & 7
        if wire_type == _VARINT:
            value, position = _varint(content, position)
            yield key >> 3, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(content, position)
        elif wire_type in (_FIXED_32, _FIXED_64):
            size = 4 if wire_type == _FIXED_32 else 8
        else:
            raise ConversionError("tokenizer.model is damaged: it is no sentencepiece model")
        if size > len(content) - position:
            raise ConversionError("tokenizer.model is damaged: it ends too early")
        yield key >> 3, content[position : position + size]
        position += size


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(content):
            break
        byte = content[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ConversionError("tokenizer.model is damaged: a number has no end")


def _signed(value: int) -> int:
    """Negative numbers of 32 bits are written with 64."""
    return value - (1 << 64) if value >= 1 << 63 else value
