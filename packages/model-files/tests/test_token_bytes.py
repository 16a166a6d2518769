"""Bytes of tokens by the file of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_files import ModelFilesError
from llmstack_model_files.token_bytes import read_token_bytes

ADDED = [{"id": 5, "content": "<end>", "special": True}, {"id": 6, "content": "<x>", "special": False}]
SENTENCE_PIECE = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                  {"type": "Fuse"}]  # fmt: skip


def write(folder: Path, **fields: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": ADDED, **fields}))
    return folder


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "expected"),
    [
        ({"a": 0, "\u0120b": 1, "\u00c3": 2}, {"type": "ByteLevel"}, [b"a", b" b", b"\xc3"]),
        ({"a": 0, "\u2581b": 1, "<0xE2>": 2}, {"type": "Sequence", "decoders": SENTENCE_PIECE}, [b"a", b" b", b"\xe2"]),
        ([["a", 0.0], ["\u2581b", -1], ["<0xE2>", -2]], {"type": "Sequence", "decoders": SENTENCE_PIECE},
         [b"a", b" b", b"\xe2"]),
    ],
    ids=["bytes", "pieces", "pieces of a unigram model"],
)  # fmt: skip
def test_tokens_are_bytes_as_in_a_decoded_text(
    tmp_path: Path, vocabulary: object, decoder: object, expected: list[bytes]
) -> None:
    table, special = read_token_bytes(write(tmp_path, model={"vocab": vocabulary}, decoder=decoder))
    assert [table.get(one) for one in (0, 1, 2, 5, 6, 9)] == [*expected, b"<end>", b"<x>", None]
    assert special == {5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no vocabulary"),
        ({"model": []}, "no vocabulary"),
        ({"model": {"vocab": [3]}}, "no vocabulary"),
        ({"model": {"vocab": {}}, "added_tokens": [3]}, "no vocabulary"),
        ({"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}, "no bytes of tokens"),
        ({"model": {"vocab": {}}}, "no bytes of tokens"),
    ],
)
def test_a_file_without_them_is_refused_in_a_sentence(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read_token_bytes(write(tmp_path, **fields))


def test_the_files_of_gpt2_say_them_too(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "\u0120b": 1, "<end>": 2, "<pad>": 3, "<": 4}))
    config = {"eos_token": {"content": "<end>"}, "pad_token": "<pad>", "add_bos_token": True, "sep_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    table, special = read_token_bytes(tmp_path)
    assert [table.get(one) for one in (0, 1, 2, 4, 5)] == [b"a", b" b", b"<end>", b"<", None]
    assert special == {2, 3}


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"vocab\.json"):
        read_token_bytes(tmp_path)
