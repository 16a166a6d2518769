"""A GGUF file stands for a model folder: made once, in a cache that only its owner may write."""

from __future__ import annotations

import json
import math
import os
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from llmstack_gguf import (
    GGUFError,
    Header,
    TensorInfo,
    TensorType,
    cache_folder,
    folder,
    gguf_files,
    made_folders,
    model_folder,
    target_of,
)
from llmstack_gguf.architecture import generation_config, llama_3_factors, model_config
from llmstack_gguf.tokenizer import end_ids, tokenizer_files
from llmstack_gguf.variants import share_of

F32, Q4_K = TensorType("F32", 1, 4), TensorType("Q4_K", 256, 144)
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
}
TOKENS = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab"]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": array("f", [0, 0, 0, 0, -3, -4, -5, -2, -1]),
    "tokenizer.ggml.token_type": array("i", [2, 3, 3, 6, 1, 1, 1, 1, 1]),
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


def header(changes: dict[str, Any] | None = None, tensors: dict[str, TensorInfo] | None = None) -> Header:
    found = {"token_embd.weight": TensorInfo((9, 32), F32, 0, 1152)} | (tensors or {})
    return Header({key: value for key, value in (METADATA | (changes or {})).items() if value is not None}, found)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose header is given, in a home of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "read_model", lambda paths: header(SENTENCEPIECE))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_the_configuration_says_what_the_metadata_says() -> None:
    found = model_config(header())
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert (found["hidden_size"], found["head_dim"], found["num_key_value_heads"]) == (32, 8, 2)
    assert (found["vocab_size"], found["max_position_embeddings"]) == (9, 128)
    assert (found["eos_token_id"], found["dtype"]) == (2, "float32")
    quantized = {"blk.0.attn_q.weight": TensorInfo((32, 256), Q4_K, 0, 144 * 32)}
    assert model_config(header(tensors=quantized))["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "rwkv7"}, "the architecture 'rwkv7' is not supported as GGUF; llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "a tensor for each expert"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": -1}, "llama.block_count is missing or no count"),
        ({"llama.block_count": "2"}, "llama.block_count is missing or no count"),
        ({"llama.block_count": 1_000_000}, "its metadata says 1000000 layers"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "is missing or no number"),
        ({"llama.attention.value_length": 16}, "keys and values of different lengths"),
        ({"llama.rope.dimension_count": 4}, "rotation of a part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "the scaling 'longrope' of RoPE"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message.replace("(", r"\(")):
        model_config(header(changes))


def test_scalings_of_rope_are_kept() -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert model_config(header(linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 64}
    assert model_config(header(yarn))["rope_scaling"]["original_max_position_embeddings"] == 64


def test_factors_of_llama_3_are_recognized_and_others_refused() -> None:
    factors = llama_3_factors(32.0, 8192, 500_000.0, 64)
    big = {"llama.embedding_length": 256, "llama.rope.freq_base": 500_000.0}
    found = model_config(header(big), {"rope_freqs.weight": factors})["rope_scaling"]
    assert (found["rope_type"], found["factor"]) == ("llama3", 32.0)
    with pytest.raises(GGUFError, match="not those of Llama 3"):
        model_config(header(big), {"rope_freqs.weight": [factor * 1.1 for factor in factors]})
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    with pytest.raises(GGUFError, match="not those of Llama 3"):  # before as many are computed
        model_config(header({f"llama.{name}": 1 << 40 for name in sizes}), {"rope_freqs.weight": factors})


def test_names_are_those_of_repositories() -> None:
    names = [
        "blk.12.ffn_down.weight",
        "output_norm.weight",
        "blk.0.attn_k.weight",
        "blk.0.attn_v.weight",
        "blk.0.attn_rot_embd.weight",
    ]
    found = header(tensors={name: TensorInfo((32, 32), F32, 0, 4096) for name in names})
    down, norm, keys, values, other = (target_of(found, name) for name in names)
    assert down.names == ("model.layers.12.mlp.down_proj.weight",)
    assert norm.names == ("model.norm.weight",)
    assert other.names == ()  # follows from the metadata
    assert keys.has_interleaved_heads
    assert not values.has_interleaved_heads


@pytest.mark.parametrize("name", ["something.else", "blk.0.attn_q_norm.weight", "blk.0.attn_gate.weight"])
def test_a_tensor_that_the_architecture_does_not_have_is_refused(name: str) -> None:
    found = header(tensors={name: TensorInfo((32, 32), F32, 0, 4096)})
    with pytest.raises(GGUFError, match=rf"{name} is not known in llama, and may change answers"):
        target_of(found, name)


EXPERTS = {"llama.expert_count": 4, "llama.expert_used_count": 2}


def test_experts_of_one_tensor_have_a_name_each() -> None:
    stacked = {"blk.3.ffn_gate_exps.weight": TensorInfo((4, 64, 32), F32, 0, 32768)}
    found = header(EXPERTS, tensors=stacked)
    target = target_of(found, "blk.3.ffn_gate_exps.weight")
    assert target.is_experts
    assert target.names[3] == "model.layers.3.block_sparse_moe.experts.3.w1.weight"
    flat = header(EXPERTS, tensors={"blk.3.ffn_gate_exps.weight": TensorInfo((4, 2048), F32, 0, 32768)})
    with pytest.raises(GGUFError, match="not that of experts"):
        target_of(flat, "blk.3.ffn_gate_exps.weight")
    with pytest.raises(GGUFError, match="a tensor for each expert"):
        model_config(found)
    first = header(EXPERTS, tensors={"blk.0.ffn_gate_exps.weight": TensorInfo((4, 64, 32), F32, 0, 32768)})
    config = model_config(first)
    assert (config["architectures"], config["num_local_experts"]) == (["MixtralForCausalLM"], 4)


def test_long_factors_of_phi_3_are_in_the_configuration() -> None:
    changes = {key.replace("llama.", "phi3."): value for key, value in METADATA.items() if key.startswith("llama.")}
    changes |= {"general.architecture": "phi3", "phi3.rope.scaling.original_context_length": 64}
    changes |= {"phi3.rope.dimension_count": 6, "phi3.attention.sliding_window": 128}
    factors = {"rope_factors_long.weight": [2.0, 3.0, 4.0], "rope_factors_short.weight": [1.0, 1.0, 1.5]}
    found = model_config(header(changes), factors)
    assert found["rope_scaling"]["long_factor"] == [2.0, 3.0, 4.0]
    assert int(found["partial_rotary_factor"] * found["head_dim"]) == 6
    assert found["sliding_window"] is None  # as long as the context


def test_a_share_of_a_head_gives_its_number_of_dimensions_again() -> None:
    for head_dim in range(2, 257):
        assert all(int(share_of(number, head_dim) * head_dim) == number for number in range(2, head_dim + 1, 2))


def test_a_sentencepiece_model_merges_by_score() -> None:
    found = tokenizer_files(SENTENCEPIECE)
    model = found["tokenizer.json"]["model"]
    assert model["merges"] == [["▁", "ab"], ["a", "b"]]
    assert (model["byte_fallback"], model["unk_token"]) == (True, "<unk>")
    assert found["tokenizer.json"]["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    assert found["tokenizer_config.json"] == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages }}",
    }  # fmt: skip
    plain = tokenizer_files({**SENTENCEPIECE, "tokenizer.ggml.add_bos_token": False})
    assert plain["tokenizer.json"]["post_processor"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a"] * 9}, "two tokens of its tokenizer are the same"),
        ({"tokenizer.ggml.scores": array("f", [0])}, "no score for each token"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": array("i", [1])},
            "which tokens are special",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "whatever"}, "by the rules 'whatever'"),
        ({"tokenizer.ggml.model": "gpt2"}, "has no merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]}, "is no pair"),
    ],
)
def test_a_tokenizer_that_would_cut_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        tokenizer_files(SENTENCEPIECE | changes)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"<|endoftext|>": 3, "a": 1, "<|im_end|>": 3}, [2, 0]),  # as SmolLM2 and Qwen have them; eos is the last one
        ({"<|eot_id|>": 3, "<|eom_id|>": 3, "<|end_of_text|>": 3}, [2, 0, 1]),
        ({"<|end|>": 1, "b": 1, "</s>": 3}, [2]),  # a text of the vocabulary ends nothing
        ({"<end_of_turn>": 4, "b": 1, "<eos>": 3}, [2, 0]),
        ({"<|end|>": 3, "<|call|>": 3, "<|return|>": 3}, [2, 1]),  # gpt-oss: a message ends, the answer goes on
    ],
)
def test_tokens_of_a_known_text_end_an_answer(tokens: dict[str, int], expected: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": array("i", tokens.values()),
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert end_ids(metadata) == expected


def test_sampling_defaults_of_a_file_are_those_of_its_repository() -> None:
    found = generation_config(
        header(
            {
                "general.sampling.temp": struct.unpack("f", struct.pack("f", 0.6))[0],
                "general.sampling.top_k": 20,
                "general.sampling.penalty_repeat": struct.unpack("f", struct.pack("f", 1.05))[0],
                "general.sampling.top_p": math.nan,
                "general.sampling.mirostat": 2,
                "general.sampling.min_p": "0.1",
            }
        )
    )
    found.pop("eos_token_id", None)
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def test_entries_that_a_file_lacks_make_a_folder_of_their_own(file: Path) -> None:
    plain, more = model_folder(file), model_folder(file, {"temperature": 0.2, "eos_token_id": 7})
    assert plain != more == model_folder(file, {"eos_token_id": 7, "temperature": 0.2})
    assert gguf_files(more) == gguf_files(plain) == [file]
    assert json.loads((plain / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    assert json.loads((more / "generation_config.json").read_text()) == {"eos_token_id": [2], "temperature": 0.2}


def test_an_unknown_token_that_is_no_token_is_none() -> None:
    found = tokenizer_files(SENTENCEPIECE | {"tokenizer.ggml.unknown_token_id": 1 << 30})
    assert found["tokenizer.json"]["model"]["unk_token"] is None


def test_a_folder_is_made_once_and_leads_to_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model_folder(file)
    assert json.loads((made / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((made / "generation_config.json").read_text()) == {"eos_token_id": [2]}
    assert gguf_files(made) == [file]
    assert cache_folder().stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr(folder, "read_model", None)  # from here on nothing is read
    assert model_folder(file) == made
    os.utime(file, (1, 1))
    with pytest.raises(TypeError):
        model_folder(file)  # another file now


def test_a_link_in_any_other_folder_is_not_followed(file: Path, tmp_path: Path) -> None:
    model_folder(file)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.gguf").symlink_to(file)
    assert gguf_files(other) == []


def test_a_cache_that_others_may_write_is_refused(file: Path) -> None:
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o777)
    with pytest.raises(GGUFError, match="others may write to it"):
        model_folder(file)


def test_the_folders_used_last_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_folders, "MAX_FOLDERS", 2)
    made = []
    for number in range(4):
        os.utime(file, ns=(number, number))
        made.append(model_folder(file))
        os.utime(made[-1], ns=(number, number))
    assert [path.exists() for path in made] == [False, False, True, True]


def test_without_a_known_tokenizer_the_folder_has_none_and_the_log_says_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "read_model", lambda paths: header())
    made = model_folder(file)
    assert not (made / "tokenizer.json").exists()
    assert "model.gguf: it has no tokenizer. Name a folder" in caplog.text


def test_factors_of_rope_are_read_from_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = llama_3_factors(8.0, 8192, 10_000.0, 8)
    file.write_bytes(struct.pack(f"<{len(factors)}f", *factors))
    tensors = {"rope_freqs.weight": TensorInfo((len(factors),), F32, 0, 4 * len(factors))}
    monkeypatch.setattr(folder, "read_model", lambda paths: header(SENTENCEPIECE, tensors))
    assert json.loads((model_folder(file) / "config.json").read_text())["rope_scaling"]["factor"] == 8.0
