"""What is compiled, what is refused and with which code, and what is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmstack_structured_output import GrammarCompiler, GrammarLimits
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer
from llmstack_types import InvalidRequestError, StructuredOutputsParams


def is_complete(compiler: GrammarCompiler, text: str, **constraint: Any) -> bool:
    matcher = compiler.compile(StructuredOutputsParams(**constraint)).new_matcher()
    return matcher.accept(text.encode()) and matcher.is_complete


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": OBJECT}, ['{"a": 1}', '{"a":-3\n}'], ["{}", '{"a":"1"}', '{"a":1,"b":2}', "1"]),
        ({"json": True}, ["1", "{}"], [""]),
        ({"json": "true"}, ["1", '"x"', "null", "[{}]"], ["x", ""]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["[]", "1", "{} "]),
        ({"json_object": True, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json_object": True, "whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":  1}']),
        ({"regex": r"\d{3}-[a-z]+"}, ["123-ab"], ["123", "x123-ab", "123-ab!"]),
        ({"regex": r"\d\D\w\W\s\S"}, ["1a_- .", "0٣Z٣\té"], ["٣a_- .", "1aé- .", "1a_-\u2003."]),
        ({"regex": r"[^\d]\\d[\w-]"}, ["٣\\d-", "a\\d_"], ["1\\d-", "a\\1-", "a\\dé"]),
        ({"regex": r"[a-c-\d][]\d][^]\s][[\w]]"}, ["-]xz", "b0[_"], ["-]]z", "0] z", "d0xz"]),
        ({"grammar": r"start: /\d/ `\d` // \d".replace("`", '"').replace(r'"\d"', r'"\\d"')}, ["1\\d"], ["٣\\d"]),
        ({"json": {"type": "string", "pattern": r"^\d\w$"}}, ['"1a"'], ['"٣a"', '"1é"']),
        ({"json_object": True, "whitespace_pattern": r"\s"}, ['{"a":\t1}'], ['{"a":\u20031}']),
        ({"regex": "^a|bc$"}, ["a", "bc"], ["abc", "^a"]),
        ({"regex": "^(a|b)$"}, ["a", "b"], ["ab", "^a$"]),
        ({"regex": r"a\$"}, ["a$"], ["a"]),
        ({"regex": "a/b\nc"}, ["a/b\nc"], ["a/b"]),
        (
            {"choice": ["red", 'a "quoted" one', "new\nline", "über 😀", "\x7f"]},
            ["red", 'a "quoted" one', "über 😀", "\x7f"],
            ["re", "x"],
        ),
        ({"grammar": 'root ::= "a" x*\nx ::= [0-9] | "(" x ")"'}, ["a1", "a((3))", "a"], ["b", "a(3"]),
        ({"grammar": 'start: "a" x*\nx: /[0-9]/ | "(" x ")"'}, ["a1", "a((3))", "a"], ["b", "a(3"]),
    ],
    ids=str,
)
def test_a_constraint_allows_what_it_describes_and_nothing_else(
    compiler: GrammarCompiler, constraint: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not is_complete(compiler, text, **constraint)] == []
    assert [text for text in bad if is_complete(compiler, text, **constraint)] == []


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "structured_outputs", "invalid_value"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs", "invalid_value"),
    ({"json_object": False}, "structured_outputs", "invalid_value"),
    ({"json": "{"}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": False}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": 0}, "structured_outputs.json", "invalid_value"),
    ({"json": "[]"}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": "false"}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"minimum": float("inf")}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"type": "objekt"}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"not": {"type": "string"}}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"$ref": "https://example.com/schema"}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"$ref": "#"}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"enum": []}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"description": "x" * 70_000}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"enum": list(range(1001))}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"type": "string", "pattern": "a{2000}"}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"type": "string", "maxLength": 10**9}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"allOf": [{"pattern": "a"}] * 17}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"allOf": [{"allOf": [{"pattern": "a"}] * 17}]}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": deep(30)}, "structured_outputs.json", "schema_too_complex"),
    ({"json": "[" * 60_000}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "structured_outputs.json", "invalid_json_schema"),
    ({"json": {"$ref": "#/$defs/limit"}}, "structured_outputs.json", "invalid_json_schema"),
    ({"regex": "[a"}, "structured_outputs.regex", "invalid_regex"),
    ({"regex": r"(a)\1"}, "structured_outputs.regex", "invalid_regex"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex", "invalid_regex"),
    ({"regex": "a" * 10_000}, "structured_outputs.regex", "grammar_too_complex"),
    ({"regex": "a{1,1001}"}, "structured_outputs.regex", "grammar_too_complex"),
    ({"regex": "a{00001001}"}, "structured_outputs.regex", "grammar_too_complex"),
    ({"choice": []}, "structured_outputs.choice", "invalid_value"),
    ({"choice": ["a", ""]}, "structured_outputs.choice", "invalid_value"),
    ({"choice": list(map(str, range(1001)))}, "structured_outputs.choice", "grammar_too_complex"),
    ({"choice": ["a" * 40_000, "b" * 40_000]}, "structured_outputs.choice", "grammar_too_complex"),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar", "invalid_grammar"),
    ({"grammar": 'root ::= "a'}, "structured_outputs.grammar", "invalid_grammar"),
    ({"grammar": ""}, "structured_outputs.grammar", "invalid_grammar"),
    ({"grammar": f'start: "{"a" * 40_000}"'}, "structured_outputs.grammar", "grammar_too_complex"),
    ({"grammar": f"root ::= {'(' * 20_000}"}, "structured_outputs.grammar", "grammar_too_complex"),
    ({"structural_tag": "[]"}, "structured_outputs.structural_tag", "invalid_json_schema"),
]


@pytest.mark.parametrize(("constraint", "param", "code"), REFUSALS, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_field_and_the_cause(
    compiler: GrammarCompiler, constraint: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**constraint))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.message.endswith(".")
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"grammar": "start: start"}, "no text satisfies it"),
        ({"grammar": 'start: a\na: b | /c/i "d"i e // f'}, "unknown name: b"),
        ({"json": False}, "the schema false allows no value at all"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text satisfies it"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "the branches of a oneOf have to exclude each",
        ),
    ],
)
def test_a_reason_is_a_sentence_without_the_words_of_the_library(
    compiler: GrammarCompiler, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.compile(StructuredOutputsParams(**constraint))


BOMBS: dict[str, dict[str, Any]] = {
    "nested repetitions": {"regex": "((a{1,1000}b){1,1000}c){1,1000}"},
    "repetitions side by side": {"regex": "(.{1,900}x){1,900}" * 20},
    "an automaton of 2^n states": {"regex": "(a|b)*a" + "(a|b)" * 40},
    "words in words": {"regex": r"(\w{0,900}\W{0,900}){900}"},
    "counted arrays": {"json": {"type": "array", "minItems": 90_000, "items": {"type": "array", "minItems": 90_000}}},
    "counted strings": {"json": {"type": "string", "minLength": 90_000, "maxLength": 99_999}},
    "ambiguity": {"grammar": 'start: x x x x x\nx: x x | "a"?'},
    "substrings": {"grammar": 'start: S\nS: %regex { "substring_chars": "' + "ab" * 12_000 + '" }'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_compiled_within_its_fuel(compiler: GrammarCompiler, name: str) -> None:
    try:
        matcher = compiler.compile(StructuredOutputsParams(**BOMBS[name])).new_matcher()
    except InvalidRequestError as error:
        code = error.code
    else:
        code = None
        for _ in range(50):
            mask = matcher.mask()
            allowed = [token_id for token_id in range(256) if mask[token_id // 8] >> token_id % 8 & 1]
            if not allowed or not matcher.accept(allowed[:1]):
                break
    assert code in (None, "schema_too_complex", "grammar_too_complex")


def test_equal_constraints_are_compiled_once_whatever_their_form(folder: Path) -> None:
    compiler = GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID])
    first = compiler.compile(StructuredOutputsParams(json={"type": "object"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type": "object"}')) is first
    assert compiler.compile(StructuredOutputsParams(choice=["a"])) is compiler.compile(
        StructuredOutputsParams(choice=("a",))
    )
    assert compiler.num_cached == 2


def test_the_cache_keeps_those_used_last(folder: Path) -> None:
    compiler = GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], cache_size=2)
    a, b = (compiler.compile(StructuredOutputsParams(regex=regex)) for regex in "ab")
    assert compiler.compile(StructuredOutputsParams(regex="a")) is a
    compiler.compile(StructuredOutputsParams(regex="c"))
    assert compiler.num_cached == 2
    assert compiler.compile(StructuredOutputsParams(regex="a")) is a
    assert compiler.compile(StructuredOutputsParams(regex="b")) is not b


def test_nothing_is_cached_of_a_refusal(compiler: GrammarCompiler) -> None:
    num_cached = compiler.num_cached
    with pytest.raises(InvalidRequestError):
        compiler.compile(StructuredOutputsParams(regex="["))
    assert compiler.num_cached == num_cached


def test_a_constraint_whose_limit_ends_at_its_first_token_is_refused(folder: Path) -> None:
    compiler = GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], limits=GrammarLimits(lexer_fuel=1000))
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(regex="a{900}"))  # its first mask is within the limit
    assert caught.value.code == "grammar_too_complex"


def test_limits_are_those_given(folder: Path) -> None:
    compiler = GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], limits=GrammarLimits(max_enum=2, lexer_fuel=10))
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(json={"enum": [1, 2, 3]}))
    assert caught.value.code == "schema_too_complex"
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(regex="[a-z]{3,100}[0-9]+"))
    assert caught.value.code == "grammar_too_complex"


def without_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_rubbish(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("spoil", [without_file, with_rubbish])
def test_a_tokenizer_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    write_byte_tokenizer(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
        GrammarCompiler(tmp_path, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID]).compile(StructuredOutputsParams(regex="a"))
    assert caught.value.code == "unsupported_value"


def test_a_model_without_an_end_is_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(folder, BYTE_VOCAB_SIZE, []).compile(StructuredOutputsParams(regex="a"))


def test_several_threads_compile_at_once(folder: Path) -> None:
    compiler = GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID])
    done: list[str] = []

    def compile_some(start: int) -> None:
        for number in range(start, start + 20):
            compiler.compile(StructuredOutputsParams(regex=f"x{number}"))
        done.append("done")

    threads = [threading.Thread(target=compile_some, args=(start,)) for start in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(done) == 3
    assert compiler.num_cached == 30
