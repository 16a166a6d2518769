"""The tokenizer of a folder, whatever files it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_llm.testing import END_OF_TEXT, byte_tokenizer, write_model_folder
from llmstack_llm.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

MODELS = Path(__file__).resolve().parents[5] / "shared" / "models"


def stored(name: str) -> Path:
    if not (MODELS / name / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name} is not at hand")
    return MODELS / name


def test_gpt2_makes_one_token_of_hello():
    tokenizer = load_tokenizer(stored("gpt2"))
    assert tokenizer.encode("Hello") == [15496]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (50256, 50256, 50257)
    assert tokenizer.max_chars_per_token == 128


def test_a_beginning_of_sequence_comes_only_where_the_post_processor_adds_one():
    assert load_tokenizer(stored("stories260k")).encode("Once")[0] == 1
    assert load_tokenizer(stored("stories260k")).encode("Once", add_special_tokens=False)[0] != 1
    assert load_tokenizer(stored("gpt2")).encode("Once")[0] != 50256


@pytest.mark.parametrize("text", ["Hello, wörld 😀", "", " a  b\n", "<|endoftext|> in text"])
def test_ids_and_texts_equal_those_of_transformers(text: str):
    transformers = pytest.importorskip("transformers")
    for name in ("gpt2", "stories260k"):
        ours, reference = (
            load_tokenizer(stored(name)),
            transformers.PreTrainedTokenizerFast.from_pretrained(stored(name)),
        )
        assert ours.encode(text) == reference(text)["input_ids"]
        ids = ours.encode(text)
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_vocab_and_merges_alone_give_the_same_ids(tmp_path: Path):
    folder = stored("gpt2")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    text = "Hello, wörld 😀 <|endoftext|> don't"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(folder).encode(text)


def test_vocab_and_merges_of_another_scheme_are_refused(tmp_path: Path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(TokenizerError, match="damaged"):
        load_tokenizer(tmp_path)


def test_truncation_in_the_file_is_switched_off(tmp_path: Path):
    backend = byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    write_model_folder(tmp_path, tokenizer=backend)
    assert len(load_tokenizer(tmp_path).encode("abcdef")) == 6


def test_named_tokens_may_be_objects_and_become_special():
    config = {"eos_token": {"content": "<end>", "lstrip": False}, "added_tokens_decoder": {"300": {"content": "<end>"}}}
    tokenizer = Tokenizer(byte_tokenizer(), config)
    assert tokenizer.named_tokens == {"eos_token": "<end>"}
    assert tokenizer.eos_token_id in tokenizer.special_token_ids


def test_plain_encoding_reads_special_tokens_as_characters():
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.encode(END_OF_TEXT) == [256]
    assert tokenizer.decode(tokenizer.encode_plain(END_OF_TEXT)) == END_OF_TEXT
    assert 256 not in tokenizer.encode_plain(END_OF_TEXT)


def test_a_token_has_bytes_even_where_it_is_half_a_character():
    tokenizer = Tokenizer(byte_tokenizer())
    halves = tokenizer.encode("é")
    assert [tokenizer.bytes_of(token_id) for token_id in halves] == [b"\xc3", b"\xa9"]
    assert tokenizer.text_of(halves[0]) == "\ufffd"
    assert "".join(map(tokenizer.name_of, tokenizer.encode(" é😀", add_special_tokens=False))) == "ĠÃ©ðŁĺĢ"
    assert tokenizer.name_of(99_999) == ""
    assert (tokenizer.bytes_of(99_999), tokenizer.text_of(256)) == (b"", END_OF_TEXT)


def test_a_word_of_a_sentencepiece_vocabulary_keeps_its_space():
    tokenizer = load_tokenizer(stored("stories260k"))
    assert "".join(map(tokenizer.text_of, tokenizer.encode("Once upon", add_special_tokens=False))) == " Once upon"


STARVED = """
import os, resource, sys
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
tokenizer = Tokenizer(byte_tokenizer(()))
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if not os.getuid():
    os.setuid(65534)  # the limit does not bind the administrator
print(tokenizer.encode("hi"), tokenizer.encode("hi"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes as Linux does")
def test_texts_are_tokenized_where_the_process_may_start_no_thread():
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment["RUST_BACKTRACE"] = "0"
    ran = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout == "[71, 72] [71, 72]\n"
    assert "cannot start its threads" in ran.stderr
