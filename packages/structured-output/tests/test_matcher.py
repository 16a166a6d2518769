"""One text in its grammar."""

from __future__ import annotations

import pytest

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer
from llmstack_types import StructuredOutputsParams


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return GrammarCompiler(folder, BYTE_VOCAB_SIZE + 40, [EOS_TOKEN_ID])  # logits wider than the vocabulary


def allowed(mask: bytes) -> list[int]:
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1]


@pytest.fixture
def matcher(compiler: GrammarCompiler) -> Matcher:
    return compiler.compile(StructuredOutputsParams(regex="ab?c?")).new_matcher()


def test_a_mask_allows_what_may_follow(matcher: Matcher) -> None:
    assert allowed(matcher.mask()) == [ord("a")]
    assert matcher.accept(b"a")
    assert allowed(matcher.mask()) == [ord("b"), ord("c"), EOS_TOKEN_ID]
    assert matcher.is_complete
    assert not matcher.is_finished


def test_at_the_end_only_the_end_may_follow(matcher: Matcher) -> None:
    matcher.accept(b"abc")
    assert matcher.is_finished
    assert allowed(matcher.mask()) == [EOS_TOKEN_ID]
    assert matcher.accept([EOS_TOKEN_ID])
    assert matcher.error == ""


def test_a_token_that_is_not_allowed_ends_the_matcher(matcher: Matcher) -> None:
    assert not matcher.accept(b"x")
    assert matcher.error
    assert matcher.is_finished


def test_what_could_follow_is_counted_without_being_accepted(matcher: Matcher) -> None:
    assert matcher.num_allowed(b"abx") == 2
    assert matcher.num_tokens == 0
    assert allowed(matcher.mask()) == [ord("a")]


def test_tokens_are_taken_back_the_end_too(matcher: Matcher) -> None:
    before = matcher.mask()
    matcher.accept([*b"abc", EOS_TOKEN_ID])
    matcher.rollback(2)
    assert matcher.num_tokens == 2
    assert allowed(matcher.mask()) == [ord("c"), EOS_TOKEN_ID]
    matcher.rollback(2)
    assert matcher.mask() == before
    with pytest.raises(ValueError, match="cannot be taken back"):
        matcher.rollback(1)


def test_matchers_of_one_grammar_know_nothing_of_each_other(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-z]+"))
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.accept(b"abc")
    assert second.num_tokens == 0
    assert not second.is_complete
    assert first.is_complete


def test_ids_beyond_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputsParams(regex=r"(.|\n)*")).new_matcher()
    assert max(allowed(matcher.mask())) == EOS_TOKEN_ID
