"""Text as it grows against text decoded at once."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from llmstack_llm.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from llmstack_llm.text.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[5] / "shared" / "models"
TEXTS = [
    "The quick brown fox jumps over the lazy dog. ", "Grüße aus Köln, naïve café! ", "日本語のテキストと漢字。",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and more 🎉🎉", "தமிழ் எழுத்து", "  spaces\n\ttabs ", "don't won't it's",
]  # fmt: skip


@functools.cache
def trained() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|user name|>"],
    )  # fmt: skip
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.add_tokens([AddedToken("ünïcode ädded", normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"})


@functools.cache
def stored(name: str) -> Tokenizer:
    path = MODELS / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"the tokenizer of {name} is not at hand")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))


@functools.cache
def other(kind: str) -> Tokenizer:
    vocab = {"<s>": 0, "hello": 1, "##lo": 2, "wor": 3, "##ld": 4, "▁a": 5, "▁bc": 6, "d": 7, "▁": 8, "!": 9, "é": 10}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.decoder = decoders.WordPiece(cleanup=False) if kind == "wordpiece" else decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.finish()]


def check(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> None:
    pieces = streamed(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.lists(st.integers(0, 520), max_size=40), st.booleans())
@settings(max_examples=300)
def test_pieces_join_to_the_whole_decode_for_random_ids_of_a_byte_level_tokenizer(token_ids: list[int], skip: bool):
    check(trained(), token_ids, skip)


@given(st.text(max_size=60), st.booleans())
def test_pieces_join_to_the_whole_decode_for_any_text(text: str, skip: bool):
    text = text.encode("utf-8", "replace").decode()
    check(trained(), trained().encode(text), skip)


@pytest.mark.parametrize("name", ["gpt2", "stories260k"])
def test_pieces_join_to_the_whole_decode_for_random_ids_of_stored_tokenizers(name: str):
    tokenizer = stored(name)

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40), st.booleans())
    @settings(max_examples=200)
    def run(token_ids: list[int], skip: bool) -> None:
        check(tokenizer, token_ids, skip)

    run()


@pytest.mark.parametrize("name", ["gpt2", "stories260k"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_decode_for_real_text_of_stored_tokenizers(name: str, text: str):
    check(stored(name), stored(name).encode(text * 3), skip_special_tokens=True)


def test_byte_tokens_of_a_sentencepiece_vocabulary_join_to_the_whole_decode():
    tokenizer = stored("stories260k")

    @given(st.lists(st.one_of(st.integers(0, 258), st.integers(3, 258), st.integers(259, 511)), max_size=30))
    @settings(max_examples=200)
    def run(token_ids: list[int]) -> None:
        check(tokenizer, token_ids, skip_special_tokens=True)

    run()


@pytest.mark.parametrize("kind", ["wordpiece", "metaspace"])
def test_other_decoders_join_to_the_whole_decode_too(kind: str):
    tokenizer = other(kind)

    @given(st.lists(st.integers(0, 12), max_size=20), st.booleans())
    @settings(max_examples=150)
    def run(token_ids: list[int], skip: bool) -> None:
        check(tokenizer, token_ids, skip)

    run()


def test_a_token_alone_is_decoded_once_for_all_streams():
    tokenizer, decoded = other.__wrapped__("wordpiece"), list[list[int]]()
    texts = [streamed(tokenizer, [1, 2, 99, 1], skip_special_tokens=False) for _ in range(2)]
    assert texts[0] == texts[1]
    assert dict(tokenizer.token_texts) == {1: tokenizer.decode([1]), 2: tokenizer.decode([2]), 99: None}

    class Backend:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(token_ids.copy())
            return tokenizer.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    later = make_detokenizer(tokenizer)
    assert isinstance(later, WindowDetokenizer)
    later._decode = functools.partial(Backend().decode, skip_special_tokens=False)
    assert "".join([later.append(1), later.append(2)]) == tokenizer.decode([1, 2])
    assert decoded == [[1], [1, 2]]  # and not again the newest one alone


def test_each_kind_of_decoder_gets_its_own_detokenizer():
    assert isinstance(make_detokenizer(trained()), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(other("metaspace")), WindowDetokenizer)


def test_a_sentencepiece_vocabulary_gets_the_byte_fallback_detokenizer():
    assert isinstance(make_detokenizer(stored("stories260k")), ByteFallbackDetokenizer)


@given(st.text(alphabet="aé日😀👩‍👧 ", min_size=1, max_size=20))
def test_no_piece_of_valid_text_ever_holds_a_broken_character(text: str):
    for tokenizer in (trained(),):
        pieces = streamed(tokenizer, tokenizer.encode(text), skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text


def test_a_character_comes_with_the_token_that_completes_it():
    tokenizer = trained()
    token_ids = [tokenizer.backend.token_to_id(char) for char in "ðŁĺĢ"]  # the bytes of one emoji
    assert streamed(tokenizer, token_ids, skip_special_tokens=True) == ["", "", "", "😀", ""]


def test_an_incomplete_character_at_the_end_is_shown_as_one_replacement():
    tokenizer = trained()
    token_ids = [tokenizer.backend.token_to_id(char) for char in "ðŁ"]
    assert streamed(tokenizer, token_ids, skip_special_tokens=True)[-1] == "\ufffd"


def test_special_tokens_are_shown_only_when_asked_for():
    tokenizer = trained()
    end = tokenizer.special_tokens["<|endoftext|>"]
    assert streamed(tokenizer, [end], skip_special_tokens=True) == ["", ""]
    assert streamed(tokenizer, [end], skip_special_tokens=False) == ["<|endoftext|>", ""]


def test_single_special_tokens_are_kept_among_skipped_ones():
    tokenizer = trained()
    ids = [tokenizer.special_tokens[name] for name in ("<|endoftext|>", "<|user name|>", "<|endoftext|>")]
    detokenizer = make_detokenizer(tokenizer, kept_special_tokens=("<|user name|>", "no such token"))
    assert [detokenizer.append(token_id) for token_id in ids] == ["", "<|user name|>", ""]


def test_a_continuation_keeps_the_space_that_a_text_of_its_own_would_lose():
    tokenizer = stored("stories260k")
    token_id = tokenizer.encode("once", add_special_tokens=False)[0]
    alone = make_detokenizer(tokenizer).append(token_id)
    continued = make_detokenizer(tokenizer, is_continuation=True).append(token_id)
    assert continued == " " + alone


def test_huge_and_negative_ids_are_left_out():
    assert streamed(trained(), [2**40, -1, 2**31], skip_special_tokens=False) == ["", "", "", ""]
