"""Folders with a list of word pieces give the tokens that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.text.tokenizer import TokenizerError, load_tokenizer
from llmstack_llm.text.word_piece import word_piece_tokenizer

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "##s",
    "sat",
    "un",
    "##want",
    "##ed",
    ",",
    "e",
    "E",
]


def write(folder: Path, config: dict[str, Any], pieces: list[str] = PIECES) -> Path:
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_words_become_their_longest_pieces_between_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, {}))
    assert tokenizer.encode("The cats, unwanted, sat") == [2, 5, 6, 7, 12, 9, 10, 11, 12, 8, 3]
    assert tokenizer.encode("zebra") == [2, 1, 3]
    assert tokenizer.encode_texts(["the", "cat"]) == ([2, 5, 3, 6, 3], [0, 0, 0, 1, 1])
    assert tokenizer.decode([2, 6, 7, 3], skip_special_tokens=True) == "cats"
    assert tokenizer.special_token_ids == {0, 1, 2, 3, 4}


def test_the_configuration_decides_about_case_and_accents(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, {})).encode("É", add_special_tokens=False) == [13]
    cased = load_tokenizer(write(tmp_path, {"do_lower_case": False, "strip_accents": True}))
    assert cased.encode("É", add_special_tokens=False) == [14]


@given(st.text(alphabet="The cats,unwedÉ 中\t", max_size=20), st.booleans())
def test_any_text_gives_the_tokens_of_transformers(text: str, is_lower: bool) -> None:
    transformers = pytest.importorskip("transformers")
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    reference = transformers.BertTokenizer(vocab=vocab, do_lower_case=is_lower)
    ours = word_piece_tokenizer("\n".join(PIECES), {"do_lower_case": is_lower})
    assert ours.encode(text).ids == reference(text)["input_ids"]
    pair = ours.encode(text, "the cat")
    expected = reference(text, "the cat")
    assert (pair.ids, pair.type_ids) == (expected["input_ids"], expected["token_type_ids"])


def test_only_line_feeds_end_lines() -> None:
    tokenizer = word_piece_tokenizer("\r\n".join([*PIECES, "a\u2028b", "dog", ""]), {})
    assert tokenizer.encode("dog").ids == [2, len(PIECES) + 1, 3]


@pytest.mark.parametrize(
    ("config", "pieces", "text"),
    [
        ({}, ["a", "b"], r"lacks \[CLS\], \[SEP\], \[UNK\]"),
        ({"tokenizer_class": "JapaneseTokenizer"}, PIECES, "JapaneseTokenizer needs a tokenizer.json"),
    ],
)
def test_other_folders_are_refused(config: dict[str, Any], pieces: list[str], text: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=text):
        load_tokenizer(write(tmp_path, config, pieces))
