"""Tokenizers in other formats are converted to a tokenizer.json that gives the same ids."""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_gguf import cache_of, made_folders
from llmstack_llm.model.config import load_model_config
from llmstack_llm.model.tokenizer_files import cache, converted_folder
from llmstack_llm.model.tokenizer_files.child import convert
from llmstack_llm.model.tokenizer_files.source import ConversionError, find_source
from llmstack_llm.testing import write_model_folder
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "", "Hello world", " a  b ", "the other\nlines\tand 12345 numbers", "wörld 😀 naïve 中文字", "DON'T don't we'll",
)  # fmt: skip
CORPUS = ["the cat and the other dog run over there", "hello world, hello there", "numbers 123 and 456", "ab ba aab"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def here(folder: Path) -> Tokenizer:
    """Converts in this process, which costs less."""
    output = folder / "converted"
    output.mkdir(exist_ok=True)
    source = find_source(folder)
    assert source is not None
    convert(folder, output, *source)
    return load_tokenizer(output)


def ranked_tokens() -> list[bytes]:
    """All bytes, then what byte pair encoding of a few words would merge."""
    merged = (
        b"he",
        b"ll",
        b"hell",
        b"hello",
        b" w",
        b"or",
        b" wor",
        b"th",
        b"the",
        b" the",
        b"12",
        b"123",
        b"\xc3\xb6",
    )
    return [*(bytes([byte]) for byte in range(256)), *merged]


def write_tiktoken(path: Path) -> None:
    lines = (base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(ranked_tokens()))
    path.write_bytes(b"\n".join(lines) + b"\n")


def tekken(**config: Any) -> dict[str, Any]:
    ranked = ranked_tokens()
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "ignore")}
        for rank, token in enumerate(ranked)
    ]
    sizes = {"num_vocab_tokens": len(ranked), "default_vocab_size": len(ranked) + 20, "default_num_special_tokens": 20}
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {"config": {"pattern": pattern, "version": "v3", **sizes, **config}, "vocab": vocab}


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    return part(1, part(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))


# As the families' own tokenizers have them.
WORD_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERNS = {
    "tokenizer.model": WORD_ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + SPACES,
    "qwen.tiktoken": WORD_ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + SPACES,
    "tiktoken.model": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{WORD_ENDS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{WORD_ENDS}?|\p{{N}}{{1,3}}|" + SPACES,
}
UNKNOWN = piece("<unk>", kind=2)
BPE = part(2, b"\x18\x02")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "options",
    [
        {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<user>"], "add_dummy_prefix": False},
    ],
    ids=["as Llama", "normalized"],
)
def test_ids_equal_those_of_sentencepiece(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    written = io.BytesIO()
    size = 330 if "byte_fallback" in options else 60
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, model_type=kind, vocab_size=size,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    reference = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokenizer = here(tmp_path)
    for text in (*TEXTS, *CORPUS, "the<user>cat"):
        if "<user>" in text and "user_defined_symbols" not in options:
            continue
        expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        if options.get("byte_fallback"):
            assert tokenizer.decode(expected) == reference.decode(expected)
    assert tokenizer.bos_token_id == reference.bos_id()
    assert tokenizer.encode("the")[0] == reference.bos_id()


@pytest.mark.parametrize("rule", ["identity", "nfkc", "nmt_nfkc"])
@pytest.mark.parametrize("removes", [True, False])
def test_spaces_lines_and_marks_are_cleaned_as_by_sentencepiece(rule: str, removes: bool, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    written = io.BytesIO()
    corpus = ["ab ｶﾞｷﾞ é", "b\u200d\r\n ガギ", "a▁b"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=written, model_type="bpe", vocab_size=320, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, character_coverage=1.0, normalization_rule_name=rule,
        remove_extra_whitespaces=removes,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    reference = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokenizer = here(tmp_path)
    for text in ("a\n  b", "a  \nb ", " \n a", "a▁▁", "▁a ", "ｶﾞｷﾞ", "a\r\nb", "a\r\n\r\n", "be\u0301\u200da"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_texts_between_special_tokens_are_read_as_by_slow_tokenizers(kind: str, removes: bool, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, model_type=kind, vocab_size=330, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, remove_extra_whitespaces=removes,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    reference = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokenizer = here(tmp_path)

    def later(text: str) -> list[int]:
        """What transformers' `legacy=False` gives: the text behind a marker that is removed again."""
        marker = reference.encode("the")
        return reference.encode("the" + text)[len(marker) :] if text.startswith(" ") else reference.encode(text)[1:]

    for text in (" the cat", "  the cat", " the  cat ", "   "):
        found = tokenizer.encode(f"the</s>{text}", add_special_tokens=False)
        assert found == [*reference.encode("the"), reference.eos_id(), *later(text)], text
    for text in ("the cat", *([" the cat", "  the cat ", "   "] if removes else [])):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text


def test_a_bpe_model_of_sentencepiece_merges_the_best_piece_first(tmp_path: Path) -> None:
    pieces = b"".join(piece(text, -rank) for rank, text in enumerate(("ab", "bc", "▁ab", "▁", "a", "b", "c")))
    (tmp_path / "tokenizer.model").write_bytes(UNKNOWN + pieces + BPE)
    tokenizer = here(tmp_path)
    assert tokenizer.encode("abc") == [3, 7]
    assert tokenizer.encode("bc") == [4, 2]
    assert tokenizer.encode("xy") == [4, 0]


def test_tokens_that_the_configuration_adds_keep_their_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(UNKNOWN + piece("▁") + piece("a") + BPE)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": 3}))
    decoder = {"4": {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "eos_token": "<|end|>"})
    )
    tokenizer = here(tmp_path)
    assert tokenizer.encode("<|user|>a<|end|>") == [3, 1, 2, 4]
    assert tokenizer.special_tokens.keys() == {"<unk>", "<|end|>"}


@pytest.mark.parametrize(
    ("name", "special", "offset"),
    [
        ("tokenizer.model", "<|eot_id|>", 9),
        ("qwen.tiktoken", "<|im_end|>", 2),
        ("qwen.tiktoken", "<|extra_204|>", 207),
        ("tiktoken.model", "[EOT]", 3),
        ("tiktoken.model", "<|reserved_token_524|>", 255),
    ],
)
def test_ids_equal_those_of_tiktoken(name: str, special: str, offset: int, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    write_tiktoken(tmp_path / name)
    if name == "tiktoken.model":
        added = {str(len(ranked_tokens()) + 3): {"content": "[EOT]", "special": True}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    ranks = {token: rank for rank, token in enumerate(ranked_tokens())}
    token_id = len(ranks) + offset
    reference = tiktoken.Encoding(
        "made", pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={special: token_id}
    )
    tokenizer = here(tmp_path)
    for text in (*TEXTS, *CORPUS, "hello中文world  \n\n  x", "ABCdef's GHI 1234567", f"the{special}the"):
        expected = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == text
    assert tokenizer.special_tokens[special] == token_id


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("tokenizer.model", {"model_type": "chatglm"}, "no Llama 3 but of the type 'chatglm'"),
        ("tokenizer.model", {"model_type": "llama4", "text_config": {}}, "no Llama 3 but of the type 'llama4'"),
        ("tokenizer.model", {"model_type": "llama", "vocab_size": 500}, "has 525 tokens .* and the model has 500"),
        ("qwen.tiktoken", {"text_config": {"vocab_size": 300}}, "has 477 tokens .* and the model has 300"),
        ("hy.tiktoken", {}, "hy.tiktoken does not say how it cuts texts"),
        ("tiktoken.model", {}, "special tokens of tiktoken.model are missing"),
    ],
)
def test_a_tiktoken_file_of_another_family_is_not_taken_for_one_of_ours(
    name: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_tiktoken(tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=reason):
        here(tmp_path)


def test_llama_3_has_its_special_tokens_behind_the_others(tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "tokenizer.model")
    tokenizer = here(tmp_path)
    first = len(ranked_tokens())
    assert tokenizer.encode("hello<|eot_id|>") == [first, 259, first + 9]
    assert tokenizer.special_tokens["<|reserved_special_token_247|>"] == first + 255


def test_ids_equal_those_of_tekken(tmp_path: Path) -> None:
    reason = "mistral-common is not installed"
    module = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason=reason, exc_type=ImportError)
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    reference = module.Tekkenizer.from_file(tmp_path / "tekken.json")
    tokenizer = here(tmp_path)
    for text in (*TEXTS, *CORPUS):
        assert tokenizer.encode(text) == reference.encode(text, bos=True, eos=False), text
    assert tokenizer.special_tokens["[INST]"] == reference.get_special_token("[INST]")


def test_tekken_has_its_special_tokens_in_front(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(default_vocab_size=290, default_num_special_tokens=30)))
    tokenizer = here(tmp_path)
    assert tokenizer.encode("he") == [1, 30 + 256]
    assert tokenizer.encode("hell") == [1, 30 + 258]
    assert tokenizer.encode("hello", add_special_tokens=False) == [30 + 259]
    assert tokenizer.special_tokens["<SPECIAL_29>"] == 29


def test_a_child_converts_once_and_the_copy_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model_folder(tmp_path / "model", config={"model_type": "llama", "vocab_size": 600})
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text("hello")
    write_tiktoken(folder / "tokenizer.model")
    converted = load_model_config(str(folder)).tokenizer_path
    assert converted is not None
    assert converted.parent == cache_of(cache.KIND) == tmp_path / "cache" / "llmstack" / "tokenizers"
    assert stat.S_IMODE(converted.stat().st_mode) == stat.S_IMODE(converted.parent.stat().st_mode) == 0o700
    assert load_tokenizer(converted).encode("hello", add_special_tokens=False) == [259]
    assert (converted / "chat_template.jinja").read_text() == "hello"
    monkeypatch.setattr(cache, "_convert", None)
    assert converted_folder(folder) == converted
    (folder / "chat_template.jinja").write_text("another")
    with pytest.raises(TypeError):  # another content is converted again
        converted_folder(folder)
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama4"}))
    with pytest.raises(TypeError):  # what is a Llama 3's is refused for another model
        converted_folder(folder)


def test_the_cache_keeps_the_folders_that_were_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, output: Path, *names: str) -> None:
        (output / "tokenizer.json").touch()

    monkeypatch.setattr(cache, "_convert", write)
    monkeypatch.setattr(made_folders, "MAX_FOLDERS", 2)
    made = []
    for index in range(3):
        (tmp_path / "tokenizer.model").write_text(f"{index}")
        made.append(converted_folder(tmp_path))
        os.utime(made[-1], (index, index))
    assert [folder.exists() for folder in made] == [False, True, True]


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    cache_of(cache.KIND).mkdir(parents=True)
    cache_of(cache.KIND).chmod(0o777)
    with pytest.raises(ConversionError, match="others may write to it"):
        converted_folder(tmp_path)


def test_what_the_child_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x7f")
    with pytest.raises(ConversionError, match=r"tokenizer\.model is damaged: it ends too early"):
        converted_folder(tmp_path)
    assert list(cache_of(cache.KIND).iterdir()) == []


def hostile() -> Iterator[tuple[str, bytes | dict[str, Any], str]]:
    yield "tokenizer.model", b"\n" + b"\xff" * 11, "has no end"
    yield "tokenizer.model", b"\n\x03\x0b\x01\x01", "is no sentencepiece model"
    yield "tokenizer.model", piece("a") + BPE, "no piece for what is unknown"
    yield "tokenizer.model", UNKNOWN + UNKNOWN + BPE, "are the same"
    yield "tokenizer.model", UNKNOWN + piece("a", float("nan")) + BPE, "NaN or infinite"
    yield "tokenizer.model", UNKNOWN + piece("a", kind=5) + BPE, "marked as unused"
    yield "tokenizer.model", UNKNOWN + piece("a" * 1025) + BPE, "more than 1024 bytes"
    yield "tokenizer.model", UNKNOWN + part(2, b"\x18\x03"), "of the kind word or char"
    yield "tokenizer.model", UNKNOWN + part(3, part(2, b"\x04\0\0\0ab")), "no tokenizer"
    yield "tokenizer.model", b"YQ== 0\nYg== 2\n", "line 2 is no token of rank 1"
    yield "tokenizer.model", b"!!! 0\n", "not base64"
    yield "tokenizer.model", b"YQ== 0\n", "lacks tokens of single bytes"
    yield "tokenizer.tiktoken", b"YQ== 0\n", "lacks tokens of single bytes"
    yield "tekken.json", {"config": {}}, "no config or no vocab"
    yield "tekken.json", tekken(default_vocab_size=1 << 40), "sizes that a vocabulary cannot have"
    yield "tekken.json", tekken(default_vocab_size=1000), "fewer tokens"
    yield "tekken.json", tekken(pattern="a" * 5000), "too long"
    yield "tekken.json", tekken(pattern="("), "no tokenizer"
    yield "tekken.json", {**tekken(), "special_tokens": [{"rank": 99, "token_str": "x"}]}, "a rank that it may have"


@pytest.mark.parametrize(("name", "content", "reason"), list(hostile()))
def test_a_hostile_file_is_refused_in_a_sentence(
    name: str, content: bytes | dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConversionError, match=reason):
        here(tmp_path)
