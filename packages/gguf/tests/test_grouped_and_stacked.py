"""Tensors whose rows repositories group by heads, or have in turns: what is refused, and what is put where."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from llmstack_gguf import GGUFError, Header, TensorInfo, TensorType, target_of
from llmstack_gguf.architecture import model_config
from llmstack_gguf.pre_tokenizers import PRE_TOKENIZERS
from llmstack_gguf.tokenizer import tokenizer_files

F32, Q8_0 = TensorType("F32", 1, 4), TensorType("Q8_0", 32, 34)
SIZES: dict[str, Any] = {
    "context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 128,
    "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
GATES, UPS = "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"


def header(architecture: str, shapes: dict[str, tuple[int, ...]], **changes: Any) -> Header:
    metadata = {f"{architecture}.{name}": value for name, value in SIZES.items()}
    metadata |= {"general.architecture": architecture}
    metadata |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in changes.items()}
    tensors = {name: TensorInfo(shape, F32, 0, 0) for name, shape in shapes.items()}
    return Header(metadata, {"token_embd.weight": TensorInfo((9, 32), F32, 0, 0)} | tensors)


def test_rows_are_grouped_by_the_heads_that_the_file_says() -> None:
    name = "blk.0.attn_qkv.weight"
    assert target_of(header("gptneox", {name: (96, 32)}), name).qkv_heads == (4, 4)
    falcon = header("falcon", {name: (64, 32)}, attention__head_count_kv=2)
    assert target_of(falcon, name).qkv_heads == (4, 2)
    assert target_of(header("gpt2", {name: (96, 32)}), name).qkv_heads is None
    with pytest.raises(GGUFError, match="has 95 rows, which are not those of 4 and 4 heads"):
        target_of(header("bloom", {name: (95, 32)}), name)
    with pytest.raises(GGUFError, match="4 heads cannot share 3 heads of keys"):
        target_of(header("falcon", {name: (64, 32)}, attention__head_count_kv=3), name)


def test_both_generations_of_falcon_are_distinguished() -> None:
    older = model_config(header("falcon", {}, attention__head_count_kv=1))
    assert (older["new_decoder_architecture"], older["num_ln_in_parallel_attn"]) == (False, 1)
    norms = {"blk.0.attn_norm.weight": (32,), "blk.0.attn_norm_2.weight": (32,)}
    newer = header("falcon", norms, attention__head_count_kv=2)
    assert (model_config(newer)["new_decoder_architecture"], model_config(newer)["num_ln_in_parallel_attn"]) == (
        True,
        2,
    )
    assert [target_of(newer, name).names[0] for name in norms] == [
        "transformer.h.0.ln_mlp.weight", "transformer.h.0.ln_attn.weight",
    ]  # fmt: skip


def test_gates_and_ups_of_gpt_oss_become_one_tensor() -> None:
    shapes = {GATES: (4, 64, 32), UPS: (4, 64, 32), "blk.1.attn_sinks.weight": (4,)}
    found = header("gpt-oss", shapes)
    gates = target_of(found, GATES)
    assert (gates.names, gates.partner) == (("model.layers.1.mlp.experts.gate_up_proj",), UPS)
    assert target_of(found, UPS).names == ()
    assert target_of(found, "blk.1.attn_sinks.weight").names == ("model.layers.1.self_attn.sinks",)


@pytest.mark.parametrize("ups", [None, TensorInfo((4, 60, 32), F32, 0, 0), TensorInfo((4, 64, 32), Q8_0, 0, 0)])
def test_gates_without_ups_of_their_kind_are_refused(ups: TensorInfo | None) -> None:
    found = header("gpt-oss", {GATES: (4, 64, 32)})
    tensors = dict(found.tensors) | ({} if ups is None else {UPS: ups})
    with pytest.raises(GGUFError, match="are not of the same shape and type"):
        target_of(Header(found.metadata, tensors), GATES)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gptj", {}, "the architecture 'gptj' is not supported as GGUF"),
        ("bloom", {"feed_forward_length": 64}, "is not four times as wide"),
        ("gptneox", {"attention__head_count": None}, "gptneox.attention.head_count is missing"),
        ("gpt-oss", {"attention__layer_norm_rms_epsilon": 1e-5}, "gpt-oss.attention.sliding_window is missing"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        model_config(header(architecture, {}, **changes))


@pytest.mark.parametrize(
    ("rules", "text", "pieces"),
    [
        ("gpt-4o", "HelloWorld's 1234/\n\nend", ["Hello", "World's", "Ġ", "123", "4", "/ĊĊ", "end"]),
        ("bloom", "ab, cd (ef", ["ab", ",", "Ġcd", "Ġ(", "ef"]),
        ("olmo", "ab 12's", ["ab", "Ġ12", "'s"]),
        ("tekken", "HelloWorld's 123/\n\nend", ["Hello", "World", "'s", "Ġ", "1", "2", "3", "/ĊĊ", "end"]),
        ("falcon3", "HelloWorld's 1234", ["HelloWorld", "'s", "Ġ", "123", "4"]),
        ("deepseek-llm", "ab, cd12\n\n x  ", ["ab", ",", "Ġcd", "1", "2", "Ċ", "Ċ", "Ġx", "ĠĠ"]),
        ("deepseek-llm", "Ελ \u4f60\u597dab", ["ÎķÎ»", "Ġ", "ä½łå¥½", "ab"]),
        ("deepseek-coder", "ab, cd12\n x", ["ab", ",", "Ġcd", "1", "2", "Ċ", "Ġx"]),
        ("falcon", "ab,. 12345's", ["ab", ",.", "Ġ", "123", "45", "'", "s"]),
        ("stablelm2", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("seed-coder", "a//\n1", ["a", "//", "Ċ", "1"]),
        ("viking", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("refact", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("qwen35", "e\u0304a 12's", ["eÌĦa", "Ġ", "1", "2", "'s"]),
        ("deepseek-v3", "ab_cd 1234\u4f60\u3042x", ["ab", "_cd", "Ġ", "123", "4", "ä½łãģĤ", "x"]),
        ("kimi-k2", "HelloWorld's\u4f60 1234", ["Hello", "World's", "ä½ł", "Ġ", "123", "4"]),
        ("bailingmoe2", "ab's\n\n12", ["ab", "'s", "ĊĊ", "1", "2"]),
        ("glm4", "ab 1234", ["ab", "Ġ", "123", "4"]),
        ("minimax-m2", "HelloWorld's 1", ["Hello", "World's", "Ġ", "1"]),
        ("command-r", "ab 12", ["ab", "Ġ", "1", "2"]),
    ],
)
def test_texts_are_cut_by_the_rules_that_a_file_names(rules: str, text: str, pieces: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rules, "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": array("i", [1]), "tokenizer.ggml.merges": [],
    }  # fmt: skip
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))
    assert [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("rules", sorted(PRE_TOKENIZERS))
def test_all_rules_keep_every_byte_of_a_text(rules: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rules, "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": array("i", [1]), "tokenizer.ggml.merges": [],
    }  # fmt: skip
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))
    text = "It's ABc\u00e9 \u4f60\u597d 12345 ?!\t\r\n  \U0001f600x  "
    pieces = [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str(text)]
    assert made.decoder.decode(pieces) == text


def test_a_word_that_is_a_token_is_that_token_by_the_rules_of_tekken() -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken", "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": array("i", [1]), "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 0,
    }  # fmt: skip
    made = tokenizer_files(metadata)["tokenizer.json"]
    assert made["model"]["ignore_merges"]
    assert made["post_processor"] is not None
