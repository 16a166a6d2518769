"""Tokenizers that make long texts of short ones are refused, and those of published models are not."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmstack_llm.text.expansion import MAX_EXPANSION, MAX_TEMPLATE_TOKENS, find_expansion_problem
from llmstack_llm.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from llmstack_types import InvalidRequestError

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
MARK = {"SpecialToken": {"id": "a", "type_id": 0}}


def settings(**parts: Any) -> str:
    vocab = {chr(code): code for code in range(32, 127)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model, **parts})


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def template(*single: dict[str, Any]) -> dict[str, Any]:
    special = {"a": {"id": "a", "ids": [97], "tokens": ["a"]}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": list(single), "pair": pair, "special_tokens": special}


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def charsmap(longest: int) -> dict[str, Any]:
    tree = bytes(1024)
    content = len(tree).to_bytes(4, "little") + tree + b"a\0" + b"b" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": replace("a" * (MAX_EXPANSION + 1))}, "normalizer may make"),
        ({"normalizer": replace("a" * 17, Regex="a*")}, "normalizer may make"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 17}}, "normalizer may make"),
        ({"normalizer": sequence("normalizers", *[replace("aa")] * 5)}, "normalizer may make"),
        ({"normalizer": sequence("normalizers", sequence("normalizers", *[replace("aa")] * 5))}, "normalizer may"),
        ({"normalizer": charsmap(18 * MAX_EXPANSION + 1)}, "normalizer may make"),
        ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 6)}, "pre_tokenizer may make"),
        ({"decoder": replace("a" * 17)}, "decoder may make"),
        ({"post_processor": template(TEXT, TEXT)}, "repeats the text"),
        ({"post_processor": sequence("processors", BYTES, template(TEXT, TEXT))}, "repeats the text"),
        ({"post_processor": template(*[MARK] * (MAX_TEMPLATE_TOKENS + 1), TEXT)}, "adds more than 1024 tokens"),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(tmp_path: Path, parts: dict[str, Any], reason: str) -> None:
    (tmp_path / "tokenizer.json").write_text(settings(**parts))
    with pytest.raises(TokenizerError, match=reason):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": replace("a" * MAX_EXPANSION)},
        {"normalizer": replace("a" * 100, String="b" * 100)},
        {"normalizer": charsmap(18)},
        {"normalizer": sequence("normalizers", {"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, replace("▁"))},
        {"pre_tokenizer": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES)},
        {"post_processor": template(MARK, TEXT, MARK)},
    ],
)
def test_usual_steps_are_allowed(parts: dict[str, Any]) -> None:
    assert find_expansion_problem(tokenizers.Tokenizer.from_str(settings(**parts))) == ""


def test_a_text_on_which_an_expression_gives_up_is_an_error_of_the_request() -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(settings(pre_tokenizer=split)))
    for encode in (tokenizer.encode, tokenizer.encode_plain, lambda text: tokenizer.encode_texts([text])):
        with pytest.raises(InvalidRequestError, match="needs too many steps"):
            encode("a" * 40 + "!")
    assert tokenizer.encode("b!") == [98, 33]
