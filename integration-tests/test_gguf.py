"""A GGUF file is a model: from its path to its published text, with the tokenizer and the template inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmstack_demo_model import model_path
from llmstack_llm import LLM, SamplingParams
from llmstack_llm.model.config import ModelConfigError
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_model_files import ModelFilesError, resolve_model

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

STORIES = Path(__file__).resolve().parents[1].parent / "shared/models/stories260k"
GPT2 = Path(__file__).resolve().parents[1].parent / "shared/models/gpt2"
TEXTS = [
    "Once upon a time, there was\n\na  girl.",
    "",
    " ",
    "naïve café 😀\t123 4567",
    "don't <s>stop</s>",
    "ÀÉ \u3000x",
]
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_stories(path: Path, kind: str = "F32") -> Path:
    """The shared model as its author's tools would convert it: linear layers of a type that fits their rows."""
    config = json.loads((STORIES / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    add_sentencepiece(writer)
    for name, tensor in load_file(STORIES / "model.safetensors").items():
        if name == "lm_head.weight":
            continue  # shared with the embeddings
        own = file_name(name)
        if own.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = in_pairs(tensor, config["hidden_size"] // config["num_attention_heads"])
        own_kind = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else "F32"]
        data = gguf.quants.quantize(tensor.float().numpy(), own_kind)
        writer.add_tensor(own, data, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sentencepiece(writer: Any) -> None:
    model = json.loads((STORIES / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    kinds = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message.content }} {% endfor %}")


def in_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows as files of Llama have them: those that are rotated together are neighbours."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape).contiguous()


def file_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, index, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_NAMES[part]}.{kind}"


needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared model stories260k is not there")


@needs_stories
def test_a_file_writes_the_published_story_of_its_model(tmp_path: Path) -> None:
    golden = json.loads((STORIES / "golden.json").read_text(encoding="utf-8"))
    case = golden["greedy_from_transformers_float32"][0]
    params = SamplingParams(temperature=0.0, max_tokens=len(case["output_token_ids"]))
    with LLM(str(write_stories(tmp_path / "stories.gguf")), num_kv_blocks=64) as llm:
        prompt = {"prompt_token_ids": case["prompt_token_ids"]}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == case["output_token_ids"]
        (chat,) = llm.chat([[{"role": "user", "content": "Once upon"}]], params, use_tqdm=False)
        assert load_tokenizer(STORIES).decode(chat.prompt_token_ids or [], skip_special_tokens=True) == "Once upon "


@needs_stories
def test_a_quantized_file_is_served_with_its_bits_and_other_quantizations_are_refused(tmp_path: Path) -> None:
    path = write_stories(tmp_path / "stories.gguf", "Q8_0")
    texts = []
    for model in (str(path), str(STORIES)):
        with LLM(model, num_kv_blocks=64, dtype="float32") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=16)
            texts.append(llm.generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0][:20] == texts[1][:20]  # eight bits change little
    with pytest.raises(ModelConfigError, match=r"quantized already \(by gguf\)"):
        LLM(str(path), quantization="int4")


@needs_stories
def test_the_tokenizer_of_a_sentencepiece_file_cuts_as_the_models_own(tmp_path: Path) -> None:
    made = load_tokenizer(resolve_model(str(write_stories(tmp_path / "stories.gguf"))))
    own = load_tokenizer(STORIES)
    for text in [*TEXTS, (STORIES / "golden.json").read_text(encoding="utf-8")]:
        assert made.encode(text) == own.encode(text)
        assert made.decode(own.encode(text)) == own.decode(own.encode(text))


@pytest.mark.parametrize("folder", [model_path(), GPT2], ids=["demo", "gpt2"])
def test_the_tokenizer_of_a_byte_level_file_cuts_as_the_models_own(folder: Path, tmp_path: Path) -> None:
    if not folder.is_dir():
        pytest.skip(f"the shared model {folder.name} is not there")
    own = load_tokenizer(folder)
    document = json.loads(own.backend.to_str())
    vocab = document["model"]["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    special = {token["content"] for token in document["added_tokens"] if token["special"]}
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    )
    writer.add_tensor("token_embd.weight", torch.zeros(len(tokens), 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = load_tokenizer(resolve_model(str(tmp_path / "model.gguf")))
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8"), *special]:
        assert made.encode(text) == own.encode(text)
        assert made.decode(own.encode(text)) == own.decode(own.encode(text))


def test_a_file_that_is_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFilesError, match=r"^model\.gguf cannot be read as GGUF: version 0 is not supported"):
        LLM(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelFilesError, match=r"^There is no file .*absent\.gguf"):
        LLM(str(tmp_path / "absent.gguf"))
