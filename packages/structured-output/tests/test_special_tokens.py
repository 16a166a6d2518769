"""A literal that is the name of a special token is written in ordinary tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmstack_structured_output import GrammarCompiler
from llmstack_structured_output.special_tokens import hide_special_tokens
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer
from llmstack_types import InvalidRequestError, StructuredOutputsParams

# Not special for Qwen3: the tags of thinking and of calls, which the library takes for special all the same.
ADDED = {"<think>": False, "</think>": False, "<tool_call>": False, "[INST]": True, "<|im_end|>": True}
NAMES = ["</s>", *ADDED]
IDS = {name: EOS_TOKEN_ID + index for index, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """For a tokenizer of bytes with more added tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, "</s>", ADDED)
    return GrammarCompiler(folder, BYTE_VOCAB_SIZE + len(ADDED), [EOS_TOKEN_ID])


def write_forced(compiler: GrammarCompiler, params: StructuredOutputsParams) -> str:
    """The only text that a constraint allows, token by token."""
    matcher = compiler.compile(params).new_matcher()
    written: list[int] = []
    while True:
        mask = matcher.mask()
        allowed = [token_id for token_id in range(EOS_TOKEN_ID + len(NAMES)) if mask[token_id // 8] >> token_id % 8 & 1]
        assert len(allowed) == 1, matcher.error
        if allowed == [EOS_TOKEN_ID]:
            return bytes(written).decode()
        assert matcher.accept(allowed)
        written += allowed


def as_json(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)


def as_tag(format_: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps({"format": format_}), disable_any_whitespace=True)


def escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in string.punctuation and char not in "<>" else char for char in text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


ONE_ONLY = {"additionalProperties": {"const": 1}, "maxProperties": 1}

# A constraint that forces a text, and what is written.
FORCED: dict[str, tuple[Callable[[str], StructuredOutputsParams], Callable[[str], str]]] = {
    "choice": (lambda text: StructuredOutputsParams(choice=[text]), str),
    "regex": (lambda text: StructuredOutputsParams(regex=escaped(text)), str),
    "grammar": (lambda text: StructuredOutputsParams(grammar=f"start: {quoted(text)}"), str),
    "GBNF": (lambda text: StructuredOutputsParams(grammar=f"root ::= {quoted(text)}"), str),
    "const": (lambda text: as_json({"const": text}), quoted),
    "enum": (lambda text: as_json({"enum": [text]}), quoted),
    "pattern": (lambda text: as_json({"type": "string", "pattern": f"^{escaped(text)}$"}), quoted),
    "property": (
        lambda text: as_json({"type": "object", "properties": {text: {"const": 1}}, "required": [text]}),
        lambda text: f"{{{quoted(text)}:1}}",
    ),
    "required": (
        lambda text: as_json({"type": "object", "required": [text], **ONE_ONLY}),
        lambda text: f"{{{quoted(text)}:1}}",
    ),
    "tag with a schema": (lambda text: as_tag({"type": "json_schema", "json_schema": {"const": text}}), quoted),
    "tag with a regex": (lambda text: as_tag({"type": "regex", "pattern": escaped(text)}), str),
    "tag with a choice": (lambda text: as_tag({"type": "choice", "choices": [text]}), str),
}  # fmt: skip
KIND = pytest.mark.parametrize("kind", FORCED)


@KIND
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("around", [("", ""), ("a", "b")], ids=["alone", "amid text"])
def test_any_forced_text_may_hold_the_name_of_any_added_token(
    compiler: GrammarCompiler, kind: str, name: str, around: tuple[str, str]
) -> None:
    constraint, written = FORCED[kind]
    text = name.join(around)
    assert write_forced(compiler, constraint(text)) == written(text)


@KIND
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from([*NAMES, "<", ">", "</", "a", "ü", " "]), min_size=1, max_size=6))
def test_texts_of_such_names_and_pieces_of_them_are_written_as_they_are(
    compiler: GrammarCompiler, kind: str, pieces: list[str]
) -> None:
    constraint, written = FORCED[kind]
    text = "".join(pieces)
    assert write_forced(compiler, constraint(text)) == written(text)


@KIND
@pytest.mark.full
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from([*NAMES, "<", ">", "</", "a", "ü", " "]) | st.text(max_size=3), min_size=1))
def test_thousands_of_texts_with_such_names_are_written_as_they_are(
    compiler: GrammarCompiler, kind: str, pieces: list[str]
) -> None:
    constraint, written = FORCED[kind]
    text = "".join(char for char in "".join(pieces) if char.isprintable())
    if text:
        assert write_forced(compiler, constraint(text)) == written(text)


def allowed_first(compiler: GrammarCompiler, params: StructuredOutputsParams) -> list[int]:
    mask = compiler.compile(params).new_matcher().mask()
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1]


@pytest.mark.parametrize("name", NAMES[1:4])
def test_the_tags_of_a_structural_tag_are_special_tokens(compiler: GrammarCompiler, name: str) -> None:
    tag = {"type": "tag", "begin": name, "content": {"type": "json_schema", "json_schema": {}}, "end": "x"}
    assert allowed_first(compiler, as_tag(tag)) == [IDS[name]]


def test_a_rule_of_a_grammar_may_name_a_special_token(compiler: GrammarCompiler) -> None:
    # Neither a string, nor a comment, nor a regular expression holds one.
    grammar = 'start: <think> "<think>" /<think>/ // <nothing>\n'
    assert allowed_first(compiler, StructuredOutputsParams(grammar=grammar)) == [IDS["<think>"]]


def test_a_grammar_with_an_unknown_special_token_is_refused_by_its_name(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="there is no special token <nothing>"):
        compiler.compile(StructuredOutputsParams(grammar="start: <nothing>"))


def test_pairs_that_make_up_a_special_token_are_not_merged() -> None:
    model = {"type": "BPE", "vocab": {"<": 0, "b>": 1, "<b>": 2}, "merges": ["< b>"], "unk_token": "<b>"}
    added = [{"content": "<b>", "id": 2, "special": False}, {"content": "<0x0A>", "id": 3, "special": False}]
    text, ids = hide_special_tokens(json.dumps({"model": model, "added_tokens": added}))
    hidden = json.loads(text)
    assert ids == {"<b>": 2}
    assert hidden["model"]["merges"] == []
    assert [name for name, token_id in hidden["model"]["vocab"].items() if token_id == 2] == [
        hidden["model"]["unk_token"]
    ]
    assert hidden["added_tokens"][0]["content"] == hidden["model"]["unk_token"] != "<b>"
    assert hidden["added_tokens"][1]["content"] == "<0x0A>"


def test_pieces_of_a_list_of_tokens_are_hidden_too() -> None:
    model = {"type": "Unigram", "vocab": [["</s>", 0.0], ["a", -1.0]], "unk_id": 0}
    added = [{"content": "</s>", "id": 0, "special": True}]
    hidden = json.loads(hide_special_tokens(json.dumps({"model": model, "added_tokens": added}))[0])
    assert [piece for piece, _ in hidden["model"]["vocab"]] == [hidden["added_tokens"][0]["content"], "a"]


def test_a_name_within_a_longer_name_is_the_longer_one(compiler: GrammarCompiler, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, "<end>", {"<a>": True, "<a><b>": True})
    inner = GrammarCompiler(tmp_path, BYTE_VOCAB_SIZE + 2, [EOS_TOKEN_ID])
    tag = {"type": "tag", "begin": "<a><b>", "content": {"type": "regex", "pattern": "x"}, "end": "y"}
    assert allowed_first(inner, as_tag(tag)) == [EOS_TOKEN_ID + 2]
