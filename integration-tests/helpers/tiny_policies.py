"""A small model that a test trains, with the tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from llmstack_llm.testing import END_OF_TEXT, byte_tokenizer

VOCAB_SIZE = 257


def write_policy(folder: Path) -> transformers.LlamaForCausalLM:
    """Writes a Llama of two layers in float32 with its tokenizer, and returns it."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=256, bos_token_id=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    policy = transformers.LlamaForCausalLM(config).float()
    policy.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{END_OF_TEXT}", "bos_token": "{END_OF_TEXT}"}}')
    return policy


def write_weights(policy: torch.nn.Module, folder: Path) -> Path:
    """Writes the weights alone, as a trainer hands them over."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in policy.state_dict().items()}, folder / "model.safetensors")
    return folder
