"""Layers that models are built from."""

from llmstack_model_runner.layers.attention import Attention, plan_attention, plan_layers
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.embedding import Embedding, OutputHead
from llmstack_model_runner.layers.head_rotation import HeadRotation
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.norm import LayerNorm, RMSNorm
from llmstack_model_runner.layers.rotary import RotaryEmbedding
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots

__all__ = [
    "Attention",
    "Embedding",
    "HeadRotation",
    "LayerNorm",
    "LayerStep",
    "Linear",
    "OutputHead",
    "RMSNorm",
    "RotaryEmbedding",
    "WeightSlot",
    "collect_slots",
    "plan_attention",
    "plan_layers",
]
