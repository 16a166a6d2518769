"""Writes checkpoints of random weights with the shapes of the tables, in bfloat16, for comparisons of servers.

Speed does not depend on values. Each has a tokenizer of made-up words, since prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def _llama(hidden: int, layers: int, heads: int, inner: int) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=32_000, max_position_embeddings=2048)
    return LlamaForCausalLM(config)


def make_model(name: str) -> PreTrainedModel:
    """The model of one of `SHAPES`; parameters are made in bfloat16."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    if name == "gpt2":
        config = GPT2Config()
        config.n_ctx = config.n_positions  # the old name, which llama.cpp's converter reads
        return GPT2LMHeadModel(config)
    sizes: Mapping[str, tuple[int, int, int, int]] = {
        "llama-110m": (768, 12, 12, 2048),
        "llama-1.1b": (2048, 22, 32, 5632),
    }
    return _llama(*sizes[name])


SHAPES = ("gpt2", "llama-110m", "llama-1.1b")


def make_tokenizer(num_words: int) -> Tokenizer:
    """A tokenizer of bytes whose other words no text has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{number}" for number in range(num_words - len(letters)))]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_checkpoint(name: str, folder: Path) -> None:
    """Model, tokenizer and configurations."""
    model: Any = make_model(name)
    model.save_pretrained(folder)
    make_tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_checkpoint(options.shape, options.folder)


if __name__ == "__main__":
    main()
