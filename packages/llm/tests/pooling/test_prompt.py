"""Texts and pairs become tokens as transformers makes them, and are cut where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from llmstack_llm.admission.rules import check_truncation
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import load_model_config
from llmstack_llm.pooling.prompt import (
    LimitedText,
    PoolingPrompt,
    TextPair,
    cut_token_ids,
    encode_pooling_prompt,
)
from llmstack_llm.testing import write_model_folder
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_types import EngineReady, InvalidRequestError, PoolingParams

WORDS = "abcdefghij"
CLS, SEP = len(WORDS), len(WORDS) + 1


def backend(pair: str = "[CLS] $A [SEP] $B:1 [SEP]:1") -> Backend:
    """A token for each word of one letter, and BERT's special tokens around them."""
    made = Backend(models.WordLevel({word: index for index, word in enumerate([*WORDS, "[CLS]", "[SEP]"])}))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return made


TOKENIZER = Tokenizer(backend())


def encode(text: Any, **options: Any) -> PoolingPrompt:
    return encode_pooling_prompt(TOKENIZER, text, **options)


def test_special_tokens_and_types_are_the_tokenizers() -> None:
    assert encode("a b") == PoolingPrompt([CLS, 0, 1, SEP])
    assert encode(TextPair("a b", "c")) == PoolingPrompt([CLS, 0, 1, SEP, 2, SEP], 4)
    assert encode(TextPair("a b", "c"), add_special_tokens=False).token_ids == [0, 1, 2]
    assert encode("") == PoolingPrompt([CLS, SEP])


def test_what_is_cut_is_text() -> None:
    assert encode("a b c d", max_tokens=4).token_ids == [CLS, 0, 1, SEP]
    assert encode("a b c d", max_tokens=4, side="left").token_ids == [CLS, 2, 3, SEP]
    assert encode("a b c d", max_tokens=6).token_ids == [CLS, 0, 1, 2, 3, SEP]
    assert encode("a b c d", max_tokens=2, add_special_tokens=False).token_ids == [0, 1]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(4, 24))
def test_of_a_pair_the_longer_text_is_cut_as_the_library_does(first: int, second: int, max_tokens: int) -> None:
    pair = TextPair(" ".join(WORDS[:first]), " ".join(WORDS[:second]))
    reference = backend()
    reference.enable_truncation(max_tokens, strategy="longest_first")
    expected = reference.encode(pair.first, pair.second)
    assert encode(pair, max_tokens=max_tokens).token_ids == expected.ids


def test_a_length_that_special_tokens_fill_is_refused() -> None:
    for text, max_tokens in (("a", 2), (TextPair("a", "b"), 3)):
        with pytest.raises(InvalidRequestError, match=f"adds {max_tokens} tokens") as caught:
            encode(text, max_tokens=max_tokens)
        assert caught.value.param == "truncate_prompt_tokens"


def test_types_without_a_start_of_the_second_text_are_refused() -> None:
    odd = Tokenizer(backend("[CLS]:1 $A [SEP] $B:1 [SEP]:1"))
    with pytest.raises(InvalidRequestError, match="unknown way"):
        encode_pooling_prompt(odd, TextPair("a", "b"))


@pytest.mark.parametrize(("asked", "expected"), [(None, None), (-1, 16), (1, 1), (16, 16)])
def test_a_length_is_none_the_models_or_its_own(asked: int | None, expected: int | None) -> None:
    assert check_truncation("truncate_prompt_tokens", asked, 16) == expected


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
        ({"truncate_prompt_tokens": 17}, "truncate_prompt_tokens", "integer_above_max_value"),
        ({"truncate_prompt_tokens": "1"}, "truncate_prompt_tokens", "invalid_type"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ],
)
def test_other_lengths_are_refused(tmp_path: Path, fields: dict[str, Any], param: str, code: str) -> None:
    folder = write_model_folder(tmp_path / "m", config={"n_positions": 16})
    processor = InputProcessor(load_model_config(str(folder)), load_tokenizer(folder))
    with pytest.raises(InvalidRequestError) as caught:
        processor.admit_pooling([1], PoolingParams(**fields))
    assert (caught.value.param, caught.value.code) == (param, code)


def test_token_ids_are_cut_as_they_are() -> None:
    assert cut_token_ids([1, 2, 3], None, "right") == [1, 2, 3]
    assert cut_token_ids([1, 2, 3], 2, "right") == [1, 2]
    assert cut_token_ids([1, 2, 3], 2, "left") == [2, 3]


@pytest.fixture
def processor(tmp_path: Path) -> InputProcessor:
    folder = write_model_folder(tmp_path / "m", config={"model_type": "bert"}, tokenizer=backend())
    made = InputProcessor(load_model_config(str(folder)), load_tokenizer(folder))
    made.set_ready(EngineReady(64, 16, 12, 257, "float32", "cpu", embedding_size=4, is_causal=False, num_labels=1))
    return made


def test_a_pair_goes_to_the_engine_with_its_types(processor: InputProcessor) -> None:
    admitted = processor.admit_pooling(TextPair("a", "b c"), PoolingParams())
    assert (admitted.prompt, admitted.prompt_token_ids) == (None, [CLS, 0, SEP, 1, 2, SEP])
    assert admitted.pooling_params.second_text_start == 3
    assert processor.admit_pooling("a", PoolingParams()).pooling_params.second_text_start is None


def test_a_model_without_token_types_receives_none(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", config={"model_type": "roberta"}, tokenizer=backend())
    made = InputProcessor(load_model_config(str(folder)), load_tokenizer(folder))
    made.set_ready(EngineReady(64, 16, 12, 257, "float32", "cpu", embedding_size=4, is_causal=False, num_labels=1))
    assert made.admit_pooling(TextPair("a", "b"), PoolingParams()).pooling_params.second_text_start is None


def test_what_is_too_long_is_refused_or_cut(processor: InputProcessor) -> None:
    long = " ".join(WORDS * 3)
    with pytest.raises(InvalidRequestError) as caught:
        processor.admit_pooling(TextPair("a", long), PoolingParams(), param="documents[0]")
    assert (caught.value.param, caught.value.code) == ("documents[0]", "context_length_exceeded")
    for prompt in (TextPair("a", long), long, {"prompt": long}, list(range(10)) * 2):
        admitted = processor.admit_pooling(prompt, PoolingParams(truncate_prompt_tokens=-1))
        assert len(admitted.prompt_token_ids) == 12
        assert admitted.pooling_params.truncate_prompt_tokens is None


def test_each_text_may_have_a_limit_of_its_own() -> None:
    limited = LimitedText("a b c d", 2)
    assert encode(limited).token_ids == [CLS, 0, 1, SEP]
    assert encode(TextPair("a b c", limited)) == PoolingPrompt([CLS, 0, 1, 2, SEP, 0, 1, SEP], 5)
    assert encode(TextPair(limited, "a b c"), side="left").token_ids == [CLS, 2, 3, SEP, 0, 1, 2, SEP]
    assert encode(TextPair("a b c", limited), max_tokens=6).token_ids == [CLS, 0, 1, SEP, 0, SEP]
    assert encode(LimitedText("a b", 3)).token_ids == [CLS, 0, 1, SEP]


def test_a_text_within_its_limit_fits_however_long_it_is(processor: InputProcessor) -> None:
    long = LimitedText(" ".join(WORDS * 3), 3)
    for prompt in (long, TextPair("a", long)):
        num_given = 3 if prompt is long else 4
        assert 0 < len(processor.admit_pooling(prompt, PoolingParams()).prompt_token_ids) <= num_given + 3


def test_a_user_may_call_the_field_otherwise(processor: InputProcessor) -> None:
    names = {"truncate_prompt_tokens": "max_tokens_per_doc"}
    with pytest.raises(InvalidRequestError) as caught:
        processor.admit_pooling("a", PoolingParams(truncate_prompt_tokens=99), param_names=names)
    assert caught.value.param == "max_tokens_per_doc"
