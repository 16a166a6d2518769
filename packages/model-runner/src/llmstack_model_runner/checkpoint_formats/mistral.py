"""Tensors in Mistral's own form, with the hub's names and order of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmstack_model_runner.checkpoint_formats.head_rows import halves_of_heads

_TOWER = "vision_tower.transformer.layers."
_LAYERS = "model.layers."
_FIXED: Mapping[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "vision_encoder.patch_conv.weight": "vision_tower.patch_conv.weight",
    "vision_encoder.ln_pre.weight": "vision_tower.ln_pre.weight",
    "pre_mm_projector_norm.weight": "multi_modal_projector.norm.weight",
    "patch_merger.merging_layer.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
    "vision_language_adapter.w_in.weight": "multi_modal_projector.linear_1.weight",
    "vision_language_adapter.w_in.bias": "multi_modal_projector.linear_1.bias",
    "vision_language_adapter.w_out.weight": "multi_modal_projector.linear_2.weight",
    "vision_language_adapter.w_out.bias": "multi_modal_projector.linear_2.bias",
}
_ATTENTION: Mapping[str, str] = {
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm",
    "wq_b": "q_b_proj", "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
}  # fmt: skip
_FEED_FORWARD: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NORMS: Mapping[str, str] = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SCALES: Mapping[str, str] = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_OF_ROWS = frozenset({"weight", "weight_packed", "weight_scale", "qscale_weight", "bias", "weight_zero_point"})
_ROTATED = re.compile(r"(vision_encoder\.transformer\.)?layers\.\d+\.attention\.w[qk]\.\w+")
_LAYER = re.compile(r"(vision_encoder\.transformer\.)?layers\.(\d+)\.(.+)\.(\w+)")
_EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")


@dataclass(frozen=True, slots=True)
class MistralForm:
    """The names and the order of tensors.

    Attributes:
        head_dim: Numbers of a head of the text model; 0 where no rows of heads are in another order.
        vision_head_dim: The same of the encoder of pictures; 0 where there is none.
        is_mixtral: Experts have the names of Mixtral.
    """

    head_dim: int
    vision_head_dim: int
    is_mixtral: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MistralForm:
        """The form of a model with this configuration, which is the one with all parts."""
        text = config.get("text_config") or config
        vision = config.get("vision_config") or {}
        is_latent = bool(text.get("kv_lora_rank"))  # its rotated numbers are in pairs in both forms
        return cls(
            0 if is_latent else _head_dim(text),
            _head_dim(vision) if vision else 0,
            text.get("model_type") == "mixtral",
        )

    def name(self, own: str) -> str:
        """The name in the hub's form; an unknown one stays, and the model's layers then refuse it."""
        if own in _FIXED:
            return _FIXED[own]
        match = _LAYER.fullmatch(own)
        if match is None:
            return own
        tower, number, part, kind = match.groups()
        found = _tower_part(part) if tower else self._text_part(part)
        return own if found is None else f"{_TOWER if tower else _LAYERS}{number}.{found}.{_SCALES.get(kind, kind)}"

    def order(self, own: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Puts the rows of queries and keys into the hub's order, in which halves of a head turn; None for others."""
        match = _ROTATED.fullmatch(own)
        head_dim = 0 if match is None else self.vision_head_dim if match.group(1) else self.head_dim
        kind = own.rpartition(".")[2]
        if not head_dim or kind not in _OF_ROWS:
            return None

        def reordered(tensor: torch.Tensor) -> torch.Tensor:
            if kind == "weight_zero_point":
                raise ValueError(f"{own[:128]}: zero points of rows in another order are not supported.")
            if tensor.numel() == 1:
                return tensor  # a scale of all rows
            num_rows = tensor.shape[0]
            if num_rows % head_dim:
                raise ValueError(f"{own[:128]} has {num_rows} rows, which are no heads of {head_dim}.")
            return tensor[halves_of_heads(num_rows, num_rows // head_dim, own)]

        return reordered

    def _text_part(self, part: str) -> str | None:
        if part in _NORMS:
            return _NORMS[part]
        block, _, name = part.rpartition(".")
        if block == "attention" and name in _ATTENTION:
            return f"self_attn.{_ATTENTION[name]}"
        if expert := _EXPERT.fullmatch(part):
            number, matrix = expert.groups()
            inner = f"block_sparse_moe.experts.{number}." if self.is_mixtral else f"mlp.experts.{number}."
            return inner + (matrix if self.is_mixtral else _FEED_FORWARD[matrix])
        if part in ("gate", "feed_forward.gate"):
            return "block_sparse_moe.gate" if self.is_mixtral else "mlp.gate"
        if block in ("feed_forward", "shared_experts") and name in _FEED_FORWARD:
            return f"mlp.{'' if block == 'feed_forward' else 'shared_experts.'}{_FEED_FORWARD[name]}"
        return None


def _tower_part(part: str) -> str | None:
    if part in _NORMS:
        return part
    block, _, name = part.rpartition(".")
    names = {"attention": _ATTENTION, "feed_forward": _FEED_FORWARD}.get(block, {})
    return f"{block}.{names[name]}" if name in names else None


def _head_dim(config: Mapping[str, Any]) -> int:
    found = config.get("head_dim")
    if type(found) is int and found > 0:
        return found
    size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if type(size) is not int or type(num_heads) is not int or num_heads < 1:
        raise ValueError("config.json: hidden_size and num_attention_heads say the size of a head, and one is missing.")
    return size // num_heads
