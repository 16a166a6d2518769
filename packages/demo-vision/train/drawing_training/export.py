"""Writes a trained network as a Hugging Face model folder that transformers' Idefics3 loads unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from drawing_training.batches import preprocessor_config
from drawing_training.network import ModelConfig, Seer
from drawing_training.tokens import AROUND, CHAT_TEMPLATE, END, END_ID, IMAGE, IMAGE_ID, SPECIAL_TOKENS, VOCAB_SIZE


def model_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": IMAGE_ID,
        "scale_factor": config.scale_factor,
        "tie_word_embeddings": True,
        **ends,
        "dtype": dtype,
        "vision_config": {
            "model_type": "idefics3_vision",
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "num_channels": 3,
            "hidden_size": config.vision_width,
            "intermediate_size": config.vision_inner,
            "num_hidden_layers": config.num_vision_layers,
            "num_attention_heads": config.num_heads,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": config.vision_eps,
            "attention_dropout": 0.0,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": config.width,
            "intermediate_size": config.inner,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_heads,
            "head_dim": config.width // config.num_heads,
            "max_position_embeddings": config.num_positions,
            "rms_norm_eps": config.eps,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            **ends,
            "dtype": dtype,
        },
    }


def tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """The content of tokenizer_config.json, chat template included."""
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Idefics3Processor",
        "model_max_length": config.num_positions,
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END],
        "added_tokens_decoder": {
            str(index): {"content": token, **special} for index, token in enumerate(SPECIAL_TOKENS)
        },
        "fake_image_token": AROUND,
        "image_token": IMAGE,
        "chat_template": CHAT_TEMPLATE,
    }


def processor_config(config: ModelConfig) -> dict[str, Any]:
    """The content of processor_config.json."""
    return {"processor_class": "Idefics3Processor", "image_seq_len": config.num_vectors}


# The likeliest token: a server takes `top_k` for its default, and from `do_sample` none.
GENERATION_CONFIG = {
    "bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": END_ID, "do_sample": True, "top_k": 1,
}  # fmt: skip


def export_model(seer: Seer, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the files of configuration, weights and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(dtype).contiguous() for name, value in seer.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    _write(folder / "config.json", model_config(seer.config, str(dtype).removeprefix("torch.")))
    _write(folder / "generation_config.json", GENERATION_CONFIG)
    _write(folder / "preprocessor_config.json", preprocessor_config(seer.config))
    _write(folder / "processor_config.json", processor_config(seer.config))
    _write(folder / "tokenizer_config.json", tokenizer_config(seer.config))
    tokenizer.save(str(folder / "tokenizer.json"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
