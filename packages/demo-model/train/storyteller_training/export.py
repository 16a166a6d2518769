"""Writes a trained network as a Hugging Face model folder that transformers' GPT-2 loads unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from storyteller_training.bpe import CHAT_TEMPLATE, END, STORYTELLER, USER
from storyteller_training.gpt2 import ModelConfig, Storyteller

LINEAR_NAMES = {
    "c_attn": "attn.c_attn",
    "attn_proj": "attn.c_proj",
    "c_fc": "mlp.c_fc",
    "mlp_proj": "mlp.c_proj",
}


def published_state(model: Storyteller, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters under GPT-2's names; its linear layers are stored [in, out], and the head is tied."""
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        layer = parts[-2]
        published = ".".join([*parts[:-2], LINEAR_NAMES.get(layer, layer), parts[-1]])
        is_transposed = layer in LINEAR_NAMES and parts[-1] == "weight"
        stored = value.t() if is_transposed else value
        state[f"transformer.{published}"] = stored.to(dtype).contiguous()
    return state


def load_model(folder: Path) -> Storyteller:
    """Return the network of a folder that `export_model` wrote."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = (content[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"))
    model = Storyteller(ModelConfig(*sizes, dropout=content["resid_pdrop"]))
    published = load_file(folder / "model.safetensors")
    wanted = published_state(model, torch.float32)
    # The names of both sides come in the same order, so the published one is found beside the network's own.
    own = dict(zip(model.state_dict(), wanted, strict=True))
    linear = {name for name in own if name.split(".")[-2] in LINEAR_NAMES and name.endswith("weight")}
    state = {name: published[other].float() for name, other in own.items()}
    model.load_state_dict({name: value.t() if name in linear else value for name, value in state.items()})
    return model


def model_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.num_positions,
        "n_ctx": config.num_positions,
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, chat template included."""
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.num_positions,
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [USER, STORYTELLER],
        "added_tokens_decoder": {
            str(index): {"content": token, **special} for index, token in enumerate((END, USER, STORYTELLER))
        },
        "chat_template": CHAT_TEMPLATE,
    }


GENERATION_CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "repetition_penalty": 1.1,
}


def export_model(model: Storyteller, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, generation config, weights and tokenizer files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published_state(model, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    _write(folder / "config.json", model_config(model.config, str(dtype).removeprefix("torch.")))
    _write(folder / "generation_config.json", GENERATION_CONFIG)
    _write(folder / "tokenizer_config.json", tokenizer_config(model.config))
    tokenizer.save(str(folder / "tokenizer.json"))


def round_weights(model: Storyteller, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round the weights in place to what `export_model` stores, so that samples come from the exported weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
