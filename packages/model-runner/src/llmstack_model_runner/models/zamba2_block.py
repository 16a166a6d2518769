"""The parts of Zamba2's layers: a shared block, one use of it, and a state space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmstack_kernels.activation import gelu
from llmstack_model_runner.layers import (
    Attention,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.head_rotation import HeadRotation
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings


class AdapterSettings(NamedTuple):
    """The adapters of one use of a block.

    Attributes:
        use: Its number, among the uses of all blocks.
        rank: Width of what is between the matrices.
        are_in_attention: Whether queries, keys and values have some beside the feed-forward.
    """

    use: int
    rank: int
    are_in_attention: bool


class EmbeddedTokens:
    """The embedded tokens, which each block reads beside hidden states.

    Attributes:
        vectors: Embeddings of the step's tokens, set before the first layer: [num_tokens, hidden_size].
    """

    vectors: torch.Tensor


class LowRankAdapter:
    """The addition of one use to the outputs of a shared layer: a product of two narrow matrices per part.

    Every rank has all of the first ones, and its outputs of the second ones.
    """

    def __init__(
        self,
        size: int,
        names: Sequence[str],
        out_features: int,
        outputs: Sequence[range],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`names` are those of the parts, all of which have as many outputs."""
        narrow = {f"{name}.0": rank for name in names}
        self._narrow = Linear(size, narrow, has_bias=False, dtype=dtype, device=device)
        self._rank = rank
        self._widen = [
            Linear(
                rank, {f"{name}.1": out_features}, has_bias=False, dtype=dtype, device=device,
                part_to_outputs={f"{name}.1": outputs},
            )
            for name in names
        ]  # fmt: skip

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of all matrices."""
        return collect_slots([self._narrow, *self._widen])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, size] to [num_tokens, own outputs of all parts]."""
        parts = self._narrow(x).split(self._rank, dim=-1)
        return torch.cat([widen(part.contiguous()) for widen, part in zip(self._widen, parts, strict=True)], -1)


class SharedBlock:
    """The weights of attention and feed-forward that several layers use; attention reads twice as wide vectors.

    Attributes:
        norm: Of hidden states with the embeddings behind them.
        qkv: To queries, keys and values.
        out: Behind attention.
        inner_norm: Of what attention gives.
        gate_up: To gates and ups.
        down: Behind the activation.
    """

    def __init__(
        self, prefix: str, settings: LlamaLayerSettings, split: HeadSplit, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`prefix` is that of its tensors, such as `model.layers.5.shared_transformer.`."""
        size, inner, has_bias = settings.hidden_size, settings.intermediate_size, settings.has_mlp_bias
        names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        self.norm = settings.norm(f"{prefix}input_layernorm", 2 * size, dtype, device)
        self.qkv = Linear(
            2 * size, split.parts(names), has_bias=False, dtype=dtype, device=device,
            part_to_outputs=split.outputs(names),
        )  # fmt: skip
        out, gate_up, down = (
            f"{prefix}{name}" for name in ("self_attn.o_proj", "feed_forward.gate_up_proj", "feed_forward.down_proj")
        )
        num_heads = settings.num_heads * settings.head_dim
        self.out = Linear(num_heads, {out: size}, has_bias=False, dtype=dtype, device=device, inputs=split.inputs)
        self.inner_norm = settings.norm(f"{prefix}pre_ff_layernorm", size, dtype, device)
        self.gate_up = Linear(
            size, {gate_up: 2 * inner}, has_bias=has_bias, dtype=dtype, device=device,
            part_to_outputs={gate_up: inner_outputs(inner)},
        )  # fmt: skip
        own = sharding().share(inner)
        self.down = Linear(inner, {down: size}, has_bias=has_bias, dtype=dtype, device=device, inputs=own)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of all layers."""
        return collect_slots([self.norm, self.qkv, self.out, self.inner_norm, self.gate_up, self.down])


def inner_outputs(inner_size: int) -> list[range]:
    """This rank's gates, and its ups behind the gates of all."""
    own = sharding().share(inner_size)
    return [own, range(own.start + inner_size, own.stop + inner_size)]


class SharedUse:
    """One use of a block: its adapters, its keys and values, and the projection of its output.

    The output is not added to the residual: the state space behind it reads it alone.
    """

    def __init__(
        self,
        prefix: str,
        block: str,
        settings: LlamaLayerSettings,
        adapters: AdapterSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`block` is the prefix of the block's tensors."""
        self.block_name, self._settings, self._types = block, settings, (dtype, device)
        self._split = HeadSplit(settings.num_heads, settings.num_kv_heads, settings.head_dim)
        own, size, (use, rank, are_in_attention) = self._split, settings.hidden_size, adapters
        self._sizes = [own.query_size, own.kv_size, own.kv_size]
        scale = settings.scale or settings.head_dim**-0.5
        self._attention = Attention(
            len(own.heads), len(own.kv_heads), settings.head_dim, scale, settings.sliding_window, device=device
        )
        self._rotate = None if rotary is None else HeadRotation(rotary)
        names = [f"{block}self_attn.linear_{name}_adapter_list.{use}" for name in "qkv"]
        self._adapter: LowRankAdapter | None = None
        if are_in_attention:
            self._adapter = LowRankAdapter(2 * size, names, 2 * size, [own.inputs], rank, dtype, device)
        name, inner = f"{block}feed_forward.gate_up_proj_adapter_list.{use}", settings.intermediate_size
        self._inner_adapter = LowRankAdapter(size, [name], 2 * inner, inner_outputs(inner), rank, dtype, device)
        self._project = Linear(size, {f"{prefix}linear": size}, has_bias=False, dtype=dtype, device=device)
        self._block: SharedBlock
        self._embedded: EmbeddedTokens

    def make_block(self) -> SharedBlock:
        """The block of this use, without weights."""
        return SharedBlock(self.block_name, self._settings, self._split, *self._types)

    def share(self, block: SharedBlock, embedded: EmbeddedTokens) -> None:
        """Uses this block from now on, over these embeddings."""
        self._block, self._embedded = block, embedded

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts, and of the block."""
        return collect_slots([self._block, self._adapter, self._inner_adapter, self._project])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """None: no checkpoint has scales of keys and values for each use."""
        return {}

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The block's output, projected, and the residual with `hidden` in it."""
        residual = hidden if residual is None else hidden + residual
        block = self._block
        normed = block.norm(torch.cat([residual, self._embedded.vectors], -1))
        attended = block.out(self._attend(normed, step))
        normed = block.inner_norm(attended)
        gates, ups = block.gate_up(normed, residual=self._inner_adapter(normed)).chunk(2, dim=-1)
        return self._project(block.down(gelu(gates.contiguous()) * ups)), residual

    def _attend(
        self,
        x: torch.Tensor,  # [num_tokens, 2 * hidden_size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
        qkv = self._block.qkv(x, residual=None if self._adapter is None else self._adapter(x))
        query, key, value = (
            part.view(len(part), -1, self._settings.head_dim) for part in qkv.split(self._sizes, dim=-1)
        )
        if self._rotate is None:
            return self._attention(query, key, value, step)
        return self._attention.rotate_and_attend(self._rotate, query, key, value, step)


class StateHalf:
    """A state space behind its norm, added to the residual; what a shared block gives is no part of that sum."""

    def __init__(self, norm: RMSNorm, mixer: Mixer, *, is_behind_block: bool) -> None:
        self._norm, self._mixer, self._is_behind_block = norm, mixer, is_behind_block

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of both parts."""
        return collect_slots([self._norm, self._mixer])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """None: there are no keys and values to scale."""
        return {}

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The state space's output, and the residual that the next norm adds it to."""
        before = residual
        normed, residual = self._norm.add(hidden, residual)
        mixed = self._mixer(normed, step)
        return mixed, before if self._is_behind_block and before is not None else residual
