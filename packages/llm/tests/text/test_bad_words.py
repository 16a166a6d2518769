"""Bad words as token ids."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from llmstack_llm.text.bad_words import BadWordSpelling, num_chars_of_bad_words
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import InvalidRequestError

# As in GPT-2: a space belongs to the word that follows it.
VOCAB = {"d": 0, "o": 1, "g": 2, "Ġ": 3, "do": 4, "dog": 5, "a": 6, "Ġdo": 7, "Ġdog": 8, "s": 9}
MERGES = [("d", "o"), ("do", "g"), ("Ġ", "do"), ("Ġ", "dog")]


@pytest.fixture
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=VOCAB, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend)


def spelled(tokenizer: Tokenizer | None, *words: str, vocab_size: int = 10) -> tuple[tuple[int, ...], ...]:
    return BadWordSpelling(tokenizer).token_ids({"bad_words": words}, vocab_size, "bad_words")


def test_a_word_is_masked_at_the_start_of_a_text_and_after_a_space(tokenizer: Tokenizer):
    assert spelled(tokenizer, "dog") == ((5,), (8,))
    assert spelled(tokenizer, "dogs") == ((5, 9), (8, 9))
    assert spelled(tokenizer, " dog", "dog") == ((5,), (8,))


def test_a_space_that_is_a_token_of_its_own_adds_nothing(tokenizer: Tokenizer):
    assert spelled(tokenizer, "s") == ((9,),)
    assert spelled(tokenizer, "sa") == ((9, 6),)


def test_a_word_is_masked_inside_a_text_where_the_tokenizer_starts_one_with_a_space():
    """As Llama's: the comma after a word is another token than one that starts a text."""
    vocab = {"▁": 0, ",": 1, "a": 2, "▁a": 3, "<unk>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made = Tokenizer(backend)
    assert made.encode_plain(",") == [0, 1]
    assert spelled(made, ",") == ((1,),)
    assert spelled(made, "a") == ((2,), (3,))


def test_what_the_model_has_no_logit_for_needs_no_mask(tokenizer: Tokenizer):
    assert spelled(tokenizer, "dog", vocab_size=8) == ((5,),)


def test_a_word_without_tokens_is_refused_by_name(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequestError, match="'Q' has no tokens") as caught:
        spelled(tokenizer, "dog", "Q")
    assert (caught.value.param, caught.value.code) == ("bad_words", "invalid_value")


def test_bad_words_need_a_tokenizer():
    with pytest.raises(InvalidRequestError) as caught:
        spelled(None, "dog")
    assert caught.value.code == "unsupported_value"


def test_sequences_given_as_token_ids_are_kept(tokenizer: Tokenizer):
    values = {"bad_words": ("dog",), "bad_words_token_ids": ((1, 2), (5,))}
    assert BadWordSpelling(tokenizer).token_ids(values, 10, "bad_words") == ((1, 2), (5,), (8,))


def test_the_prompts_of_a_request_spell_its_words_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    spelling, texts = BadWordSpelling(tokenizer), []
    encode = tokenizer.encode_plain
    monkeypatch.setattr(tokenizer, "encode_plain", lambda text: texts.append(text) or encode(text))
    for _ in range(3):
        spelling.token_ids({"bad_words": ("dog",)}, 10, "bad_words")
    assert (texts.count("dog"), texts.count(" dog")) == (1, 1)
    assert spelling.token_ids({"bad_words": ("do",)}, 10, "bad_words") == ((4,), (7,))


def test_the_characters_of_all_spellings_count():
    assert num_chars_of_bad_words(["ab", "c"]) == 9
