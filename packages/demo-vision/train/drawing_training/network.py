"""Idefics3 in plain PyTorch: SigLIP's tower, a connector and a small Llama, with the parameter names of the hub."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from drawing_training.tokens import IMAGE_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the network. Heads are 64 wide in both parts."""

    image_size: int = 64
    patch_size: int = 8
    scale_factor: int = 2
    vision_width: int = 128
    vision_inner: int = 512
    num_vision_layers: int = 4
    width: int = 128
    inner: int = 352
    num_layers: int = 4
    num_heads: int = 2
    num_positions: int = 512
    rope_theta: float = 10_000.0
    eps: float = 1e-5
    vision_eps: float = 1e-6

    @property
    def side(self) -> int:
        """Patches along a side of a picture."""
        return self.image_size // self.patch_size

    @property
    def num_vectors(self) -> int:
        """Vectors of a picture in a prompt."""
        return (self.side // self.scale_factor) ** 2


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Mixed values [batch, length, width] of heads [batch, num_heads, length, 64].

    In products of its own: the fused operation's backward pass takes 40 % of a step on a CPU.
    """
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    if is_causal:
        length = query.shape[2]
        scores = scores + torch.full((length, length), -1e4, dtype=scores.dtype).triu(1)
    return (scores.softmax(dim=3).to(value.dtype) @ value).transpose(1, 2).flatten(2)


def _heads(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    return values.unflatten(2, (num_heads, -1)).transpose(1, 2)


class VisionAttention(nn.Module):
    """Attention of all patches of a picture to each other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.num_heads = config.vision_width, config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            _heads(linear(hidden), self.num_heads) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(_attention(query, key, value, is_causal=False))


class VisionFeedForward(nn.Module):
    """Two linear layers around GELU's tanh form."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.vision_width, config.vision_inner)
        self.fc2 = nn.Linear(config.vision_inner, config.vision_width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(hidden), approximate="tanh"))


class VisionLayer(nn.Module):
    """A layer of the tower, with norms first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.vision_width, config.vision_eps)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.vision_width, config.vision_eps)
        self.mlp = VisionFeedForward(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class VisionModel(nn.Module):
    """From values [pictures, 3, size, size] to hidden states of patches [pictures, patches, vision_width]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "patch_embedding": nn.Conv2d(3, config.vision_width, config.patch_size, config.patch_size),
            "position_embedding": nn.Embedding(config.side**2, config.vision_width),
        })  # fmt: skip
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(VisionLayer(config) for _ in range(config.num_vision_layers))}
        )
        self.post_layernorm = nn.LayerNorm(config.vision_width, config.vision_eps)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        patches = self.embeddings["patch_embedding"](values).flatten(2).transpose(1, 2)
        hidden = patches + self.embeddings["position_embedding"].weight
        for layer in self.encoder["layers"]:
            hidden = layer(hidden)
        return self.post_layernorm(hidden)


class Connector(nn.Module):
    """Joins each square of patches and maps it to a vector of the language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.side, self.factor = config.side // config.scale_factor, config.scale_factor
        inputs = config.vision_width * config.scale_factor**2
        self.modality_projection = nn.ModuleDict({"proj": nn.Linear(inputs, config.width, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        squares = hidden.view(len(hidden), self.side, self.factor, self.side, self.factor, -1)
        joined = squares.transpose(2, 3).reshape(len(hidden), self.side**2, -1)
        return self.modality_projection["proj"](joined)


class RMSNorm(nn.Module):
    """Root mean square norm, in float32: torch's own warns of weights in another type than its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention with rotated positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            _heads(linear(hidden), self.num_heads) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (_rotated(states, cosine, sine).to(value.dtype) for states in (query, key))
        return self.o_proj(_attention(query, key, value, is_causal=True))


def _rotated(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """A layer of the language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(config.width, config.eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TextModel(nn.Module):
    """A Llama without its head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.eps)
        size = config.width // config.num_heads
        frequencies = config.rope_theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.arange(config.num_positions)[:, None] * torch.cat((frequencies, frequencies))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        for layer in self.layers:
            hidden = layer(hidden, self.cosine[:length], self.sine[:length])
        return self.norm(hidden)


class Seer(nn.Module):
    """The whole, with one matrix for the embeddings of tokens and the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "vision_model": VisionModel(config), "connector": Connector(config), "text_model": TextModel(config)
        })  # fmt: skip
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                is_last = name.endswith(("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight"))
                depth = self.config.num_vision_layers if ".vision_model." in name else self.config.num_layers
                nn.init.normal_(parameter, std=0.03 * ((2 * depth) ** -0.5 if is_last else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def see(self, values: torch.Tensor) -> torch.Tensor:
        """Hidden states of patches [pictures, patches, vision_width] of values [pictures, 3, size, size]."""
        return self.model["vision_model"](values)

    def forward(self, token_ids: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, width] before the head.

        `patches`: Of those rows that have a picture, in their order.
        """
        text = self.model["text_model"]
        hidden = text.embed_tokens(token_ids)
        vectors = self.model["connector"](patches).flatten(0, 1)
        hidden = hidden.to(vectors.dtype).masked_scatter((token_ids == IMAGE_ID)[..., None], vectors)
        return text(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size]."""
        return functional.linear(hidden, self.model["text_model"].embed_tokens.weight)
