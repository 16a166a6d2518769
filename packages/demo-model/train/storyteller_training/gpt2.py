"""A small GPT-2 in plain PyTorch, with parameter names that map one to one onto the published layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the network."""

    vocab_size: int = 3072
    num_positions: int = 512
    width: int = 256
    num_layers: int = 5
    num_heads: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with dropout on its way into the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.attn_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [batch, length, width] to hidden states."""
        batch, length, width = hidden.shape
        qkv = self.c_attn(self.ln_1(hidden)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, num_heads, length, head_dim]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + self._dropped(self.attn_proj(mixed))
        inner = functional.gelu(self.c_fc(self.ln_2(hidden)), approximate="tanh")
        return hidden + self._dropped(self.mlp_proj(inner))

    def _dropped(self, update: torch.Tensor) -> torch.Tensor:
        return functional.dropout(update, self.dropout, self.training)


class Storyteller(nn.Module):
    """GPT-2 with tied input and output embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.num_positions, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # GPT-2: residual projections are scaled down by the number of additions to the residual stream.
            scale = (2 * self.config.num_layers) ** -0.5 if "proj" in name else 1.0
            nn.init.normal_(parameter, std=(0.01 if "wpe" in name else 0.02) * scale)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def forward(self, token_ids: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        """Map token ids [batch, length] to logits [batch, length, vocab_size]."""
        positions = self.wpe.weight[first_position : first_position + token_ids.shape[1]]
        hidden = self.wte(token_ids) + positions
        hidden = functional.dropout(hidden, self.config.dropout, self.training)
        for block in self.h:
            hidden = block(hidden)
        return functional.linear(self.ln_f(hidden), self.wte.weight)
