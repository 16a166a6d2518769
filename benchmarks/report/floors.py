"""The least time a step can take, by arithmetic from a model's shape and two measured ceilings.

Weights are read once per step, the keys and values of the context once, activations are ignored; matrix products and
attention run one after the other. So time = max(weight bytes / read rate, FLOPs / product rate) + KV bytes / read rate.
"""

from __future__ import annotations

from dataclasses import dataclass

BITS_PER_WEIGHT = {"bf16": 16.0, "w8": 8.0, "w4": 4 + 16 / 128}
"""Of linear layers; the output head stays in bf16. Four bits have a scale for every 128 weights."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card reached in the same run."""

    read_bytes_per_s: float
    flops_per_s: float


REFERENCE_CARD = Ceilings(4.3e12, 790e12)
"""An H200: a copy, and an 8192³ product in bf16 on random data."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its floors."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    is_gated: bool
    is_tied: bool

    @property
    def num_linear_weights(self) -> int:
        """Of all layers, without embedding, norms and head."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_heads)
        return self.num_layers * (attention + (3 if self.is_gated else 2) * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, in bf16."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def weight_bytes(self, weights: str = "bf16") -> float:
        """What a step reads of linear layers and head."""
        return self.num_linear_weights * BITS_PER_WEIGHT[weights] / 8 + 2 * self.num_head_weights


GPT2 = ModelShape("GPT-2", 12, 768, 12, 12, 64, 3072, 50257, 1024, is_gated=False, is_tied=True)
LLAMA_1B = ModelShape("1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, is_gated=True, is_tied=True)
LLAMA_8B = ModelShape("8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072, is_gated=True, is_tied=False)
MODELS = (GPT2, LLAMA_1B, LLAMA_8B)


def decode_s(
    shape: ModelShape, batch: int, context: float, ceilings: Ceilings, weights: str = "bf16", kv_bits: int = 16
) -> float:
    """One step of `batch` rows that attend to `context` tokens each."""
    flops = 2 * (shape.num_linear_weights + shape.num_head_weights) * batch
    products_s = max(shape.weight_bytes(weights) / ceilings.read_bytes_per_s, flops / ceilings.flops_per_s)
    return products_s + batch * context * shape.kv_bytes_per_token * kv_bits / 16 / ceilings.read_bytes_per_s


def causal_attention_flops(num_heads: int, head_dim: int, num_tokens: int) -> float:
    """Of one layer over one prompt: two products, half of each masked."""
    return 2.0 * num_heads * head_dim * num_tokens**2


def prefill_s(shape: ModelShape, num_tokens: int, ceilings: Ceilings) -> float:
    """One prompt, head left out."""
    attention = shape.num_layers * causal_attention_flops(shape.num_heads, shape.head_dim, num_tokens)
    return (2.0 * shape.num_linear_weights * num_tokens + attention) / ceilings.flops_per_s


def requests_s(shape: ModelShape, num_requests: int, num_in: int, num_out: int, ceilings: Ceilings) -> float:
    """All requests at once: their prompts, then `num_out` steps of all of them."""
    return num_requests * prefill_s(shape, num_in, ceilings) + num_out * decode_s(
        shape, num_requests, num_in + num_out / 2, ceilings
    )
