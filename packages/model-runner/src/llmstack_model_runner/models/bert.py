"""BERT and RoBERTa: learned positions, norms last, bidirectional attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_model_runner.layers import Embedding, LayerNorm, Linear, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.linear import linear_activation
from llmstack_model_runner.models.base import Encoder
from llmstack_model_runner.models.config_values import read_float, read_int, refuse
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec

# Heads for other tasks, and a buffer that older versions of transformers saved.
_IGNORED = ("cls.", "lm_head.", "classifier.", "pooler.", "embeddings.position_ids")


class Bert(Encoder):
    """`BertModel`, and `BertForMaskedLM` without its head."""

    root: ClassVar[str] = "bert."
    # Of checkpoints converted from TensorFlow.
    renamed: ClassVar[Mapping[str, str]] = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    has_token_types: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        refuse(config, "position_embedding_type", "absolute")
        refuse(config, "is_decoder", False)
        hidden_size = read_int(config, "hidden_size", 768)
        num_heads = read_int(config, "num_attention_heads", 12)
        if hidden_size % num_heads:
            raise ValueError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}."
            )
        num_positions = read_int(config, "max_position_embeddings", 512)
        self._first_position = self._read_first_position(config)
        self.kv_spec = ModelKVSpec(
            (),
            vocab_size=read_int(config, "vocab_size", 30522),
            max_model_len=num_positions - self._first_position,
        )

        def table(name: str, num_rows: int) -> Embedding:
            return Embedding(f"{self.root}embeddings.{name}", num_rows, hidden_size, dtype=dtype, device=device)

        self._tokens = table("word_embeddings", self.kv_spec.vocab_size)
        self._positions = table("position_embeddings", num_positions)
        num_types = read_int(config, "type_vocab_size", 2)
        self._types = table("token_type_embeddings", num_types) if self.has_token_types else None
        eps = read_float(config, "layer_norm_eps", 1e-12)
        self._norm = LayerNorm(f"{self.root}embeddings.LayerNorm", hidden_size, eps, dtype=dtype, device=device)
        self._layers = [
            _Layer(config, f"{self.root}encoder.layer.{index}.", hidden_size, num_heads, dtype, device)
            for index in range(read_int(config, "num_hidden_layers", 12))
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._tokens, self._positions, self._types, self._norm, *self._layers])

    def is_ignored(self, name: str) -> bool:
        """Whether only other tasks need the tensor."""
        return name.removeprefix(self.root).startswith(_IGNORED) or super().is_ignored(name)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the last layer."""
        starts = metadata.starts_of_whole_prompts()
        hidden = self._tokens(token_ids)
        if self._types is not None:
            hidden = hidden + (self._types.weight[0] if token_types is None else self._types(token_types))
        hidden = self._norm(hidden + self._positions(positions + self._first_position))
        for layer in self._layers:
            hidden = layer(hidden, starts)
        return hidden

    def _read_first_position(self, config: Mapping[str, Any]) -> int:
        """Row of the position table for a prompt's first token."""
        return 0


class ColBert(Bert):
    """`HF_ColBERT`: BERT, whose checkpoint has a layer over the vector of each token, which `models.heads` reads."""

    def is_ignored(self, name: str) -> bool:
        """Whether BERT does not need the tensor."""
        return name.startswith("linear.") or super().is_ignored(name)


class Roberta(Bert):
    """`RobertaModel` and `XLMRobertaModel`, and their masked language models; positions start after the padding id."""

    root: ClassVar[str] = "roberta."

    def _read_first_position(self, config: Mapping[str, Any]) -> int:
        return read_int(config, "pad_token_id", 1) + 1


class _Layer:
    def __init__(
        self,
        config: Mapping[str, Any],
        prefix: str,
        hidden_size: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_heads = num_heads
        self._scale = (hidden_size // num_heads) ** -0.5
        inner_size = read_int(config, "intermediate_size", 3072)
        eps = read_float(config, "layer_norm_eps", 1e-12)

        def linear(in_features: int, parts: Mapping[str, int]) -> Linear:
            named = {prefix + name: size for name, size in parts.items()}
            return Linear(in_features, named, has_bias=True, dtype=dtype, device=device)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(f"{prefix}{name}.LayerNorm", hidden_size, eps, dtype=dtype, device=device)

        heads = {f"attention.self.{name}": hidden_size for name in ("query", "key", "value")}
        self._qkv = linear(hidden_size, heads)
        self._attention_out = linear(hidden_size, {"attention.output.dense": hidden_size})
        self._attention_norm = norm("attention.output")
        self._mlp_in = linear(hidden_size, {"intermediate.dense": inner_size})
        self._activation = linear_activation(str(config.get("hidden_act", "gelu")))
        self._mlp_out = linear(inner_size, {"output.dense": hidden_size})
        self._mlp_norm = norm("output")

    def slots(self) -> dict[str, WeightSlot]:
        parts = (self._qkv, self._attention_out, self._attention_norm, self._mlp_in, self._mlp_out, self._mlp_norm)
        return collect_slots(parts)

    def __call__(self, hidden: torch.Tensor, query_start_loc_list: list[int]) -> torch.Tensor:
        query, key, value = self._qkv(hidden).unflatten(-1, (3, self._num_heads, -1)).unbind(1)
        attended = bidirectional_attention(query, key, value, query_start_loc_list, self._scale).flatten(1)
        hidden = self._attention_norm(self._attention_out(attended, residual=hidden))
        return self._mlp_norm(self._mlp_out(self._mlp_in(hidden, self._activation), residual=hidden))
