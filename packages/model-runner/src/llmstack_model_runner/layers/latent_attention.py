"""Multi-head latent attention: all heads read one vector per token.

A head's key is a product of the latent, and so is its value. Both products are moved to the query and to what is
attended (arXiv 2405.04434, section 2.1.2): every head then reads the latent, which is the only key and value there is.
Prompts are computed in the same way, so that a token has the same bits in a prompt and decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_kernels.grouped_linear import (
    PackedExperts,
    RowGroups,
    expert_layers,
    group_rows,
    grouped_linear,
    pack_experts,
)
from llmstack_kernels.linear import AnyStoredWeight
from llmstack_kernels.paged_attention import AttentionInputs, paged_attention
from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_kernels.rotary_embedding import rotary_embedding
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.key_indexer import (
    IndexerSettings,
    KeyIndexer,
    attend_to_selected,
    selected_before,
)
from llmstack_model_runner.layers.kv_scales import KVScales
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.packing import packing
from llmstack_model_runner.layers.rotary import RotaryEmbedding, rotary_order
from llmstack_model_runner.layers.sharding import sharding, spread
from llmstack_model_runner.layers.weight_slot import WeightPart, WeightSlot, collect_slots

_NORM_EPS = 1e-6  # of the norms of latents, whatever the configuration says of others


class QueryGrowth(NamedTuple):
    """A query is multiplied by 1 + `beta` * log(1 + n), where n is how often `length` fits into its position."""

    beta: float
    length: int

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The factor of each position, float32."""
        return 1 + self.beta * torch.log1p(torch.div(positions, self.length, rounding_mode="floor").float())


@dataclass(frozen=True, slots=True)
class LatentSettings:
    """Sizes of latent attention.

    Attributes:
        query_rank: Size of the latent that queries are made of; None where they are made of the hidden state.
        rank: Size of the latent of keys and values, without the part with RoPE.
        plain_dim: Numbers of a head's key without RoPE.
        rotary_dim: Numbers with RoPE, of a head's query and of the key that all heads share.
        value_dim: Numbers of a head's value.
        scale: Factor of the attention scores.
        has_head_gates: What a head attends to is multiplied by the sigmoid of a gate.
        is_interleaved: RoPE rotates neighbouring numbers of the checkpoint; otherwise those of the two halves.
        growth: How queries grow with their position; None where they do not.
        indexer: What selects the tokens that are attended to; None where these are all.
    """

    num_heads: int
    query_rank: int | None
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    has_bias: bool = False
    has_head_gates: bool = False
    is_interleaved: bool = True
    growth: QueryGrowth | None = None
    indexer: IndexerSettings | None = None

    @property
    def width(self) -> int:
        """Numbers of a token in the KV storage."""
        return self.rank + self.rotary_dim


class LatentAttention(Mixer):
    """Latent attention with its projections. Ranks share out the heads; each has the latents of all tokens."""

    def __init__(
        self,
        prefix: str,
        size: int,
        settings: LatentSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.self_attn.`. Without RoPE all is plain.

        Raises:
            ValueError: An indexer has nothing to make its queries of.
        """
        self._settings = settings
        self._rotary = rotary
        self._is_batch_invariant = packing().is_batch_invariant
        self.kv_scales = KVScales(1, device)
        num_heads, has_bias = settings.num_heads, settings.has_bias
        heads = sharding().heads(num_heads, num_heads)[0]
        self._num_heads = len(heads)

        def linear(inputs: int, name: str, outputs: int, has_bias: bool, **layout: object) -> Linear:
            parts = {f"{prefix}{name}": outputs}
            options = {key: {f"{prefix}{name}": value} for key, value in layout.items()}
            return Linear(inputs, parts, has_bias=has_bias, dtype=dtype, device=device, **options)  # type: ignore[arg-type]

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm(f"{prefix}{name}", width, _NORM_EPS, dtype=dtype, device=device)

        rank = settings.query_rank
        self._query_down = None if rank is None else linear(size, "q_a_proj", rank, has_bias)
        self._query_norm = None if rank is None else norm("q_a_layernorm", rank)
        query_size = num_heads * (settings.plain_dim + settings.rotary_dim)
        layout = {"part_to_row_order": _query_order(settings), "part_to_outputs": _query_outputs(settings, heads)}
        self._query_up = linear(rank or size, "q_proj" if rank is None else "q_b_proj", query_size, False, **layout)
        order = torch.cat((torch.arange(settings.rank), settings.rank + _rotated(settings)))
        self._latent = linear(size, "kv_a_proj_with_mqa", settings.width, has_bias, part_to_row_order=order)
        self._latent_norm = norm("kv_a_layernorm", settings.rank)
        self._heads = _HeadProducts(f"{prefix}kv_b_proj", settings, heads, dtype, device)
        self._indexer: KeyIndexer | None = None
        if settings.indexer is not None and not settings.indexer.is_shared:
            if rank is None or rotary is None:
                raise ValueError("config.json: an indexer needs q_lora_rank and a rotary embedding.")
            self._indexer = KeyIndexer(f"{prefix}indexer.", size, rank, settings.indexer, rotary, dtype, device)
        self._gates = None
        if settings.has_head_gates:
            self._gates = linear(size, "g_proj", num_heads, False, part_to_outputs=[heads])
        self._out = Linear(
            num_heads * settings.value_dim,
            {f"{prefix}o_proj": size},
            has_bias=has_bias,
            dtype=dtype,
            device=device,
            inputs=spread(heads, settings.value_dim),
        )

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all projections and norms."""
        query = [self._query_down, self._query_norm, self._query_up]
        return collect_slots(
            [*query, self._latent, self._latent_norm, self._heads, self._indexer, self._gates, self._out]
        )

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, size]
        """Writes the tokens' latents to the cache, then attends."""
        settings, cache, metadata = self._settings, step.kv_cache[0], step.metadata
        latent, query_latent = self._latent(x), self._query_latent(x)
        plain, rotated = self._query_up(query_latent), latent[:, settings.rank :].unsqueeze(1)
        if settings.growth is not None:
            plain = plain * settings.growth.of(step.positions).to(plain.dtype)[:, None]
        query, key = plain.split([self._num_heads * settings.plain_dim, self._num_heads * settings.rotary_dim], dim=-1)
        key = key.unflatten(1, (self._num_heads, -1))
        if self._rotary is not None:
            key, rotated = rotary_embedding(step.positions, key, rotated, self._rotary.table)
        stored = torch.cat((self._latent_norm(latent[:, : settings.rank]), rotated.squeeze(1)), dim=-1)
        key_scale, value_scale = self.kv_scales.of(cache)
        reshape_and_cache(stored.unsqueeze(1), None, cache, None, metadata.slot_mapping, key_scale)
        selected = self._select(x, query_latent, step, key_scale)
        query, key = metadata.of_queries(query), metadata.of_queries(key)
        groups = self._heads.row_groups(query.shape[0])
        absorbed = self._heads.to_latents(query.unflatten(1, (self._num_heads, -1)), groups)
        inputs = AttentionInputs(
            torch.cat((absorbed, key), dim=-1),
            cache,
            cache[..., : settings.rank],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            settings.scale,
            query_start_loc_list=metadata.query_start_loc_list,
            seq_lens_list=metadata.seq_lens_list,
            max_query_len=metadata.max_query_len,
            key_scale=key_scale,
            value_scale=value_scale,
            plan=step.plans.get(None),
            decodes_as_prefills=self._is_batch_invariant,
        )
        attended = paged_attention(inputs if selected is None else attend_to_selected(inputs, selected))
        values = self._heads.to_values(attended, groups)
        if self._gates is not None:
            gates = metadata.of_queries(self._gates(x)).reshape(-1, 1)  # one per token and head
            values = sigmoid_gate(values.flatten(0, 1), gates).view(values.shape)
        return self._out(values.flatten(1))

    def _query_latent(self, x: torch.Tensor) -> torch.Tensor:
        """The latents of queries; the hidden states themselves where queries are made of these."""
        if self._query_down is None or self._query_norm is None:
            return x
        return self._query_norm(self._query_down(x))

    def _select(
        self, x: torch.Tensor, query_latent: torch.Tensor, step: LayerStep, key_scale: torch.Tensor | None
    ) -> torch.Tensor | None:  # [num_queries, num_selected] int32
        """The positions of the tokens to attend to; None for all."""
        own = self._settings.indexer
        if own is None:
            return None
        if self._indexer is None:
            return selected_before(own.selection, step.metadata)
        self._indexer.write(x, step, key_scale)
        return self._indexer.select(x, query_latent, step, key_scale)


class _HeadProducts:
    """The product of each head, in its two halves: from its query to latents, and from latents to its values.

    Heads are packed as experts are, of which each has one row of every token. They keep their precision where other
    layers are rounded: a rounded product would be rounded along other numbers than when it was trained.
    """

    def __init__(
        self, name: str, settings: LatentSettings, heads: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._settings = settings
        self._own = heads
        self._dtype, self._device = dtype, device
        self._to_latents: PackedExperts | None = None
        self._to_values: PackedExperts | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """The slot of the projection from latents to keys and values of all heads."""
        settings = self._settings
        size = settings.plain_dim + settings.value_dim
        shape, rows = (settings.num_heads * size, settings.rank), spread(self._own, size)
        part = None if len(self._own) == settings.num_heads else WeightPart(0, (rows,))

        def load_stored(weight: AnyStoredWeight) -> None:
            self._load(weight.rows(slice(rows.start, rows.stop)).to(self._device).dequantize(self._dtype))

        return {f"{self._name}.weight": WeightSlot(shape, self._load, load_stored=load_stored, part=part)}

    def row_groups(self, num_tokens: int) -> RowGroups | None:
        """The rows of each head among those of all tokens, token by token; None where heads are packed apart."""
        if expert_layers(_loaded(self._to_values)) is not None:
            return None
        return group_rows(torch.arange(len(self._own), device=self._device).expand(num_tokens, -1), len(self._own))

    def to_latents(self, queries: torch.Tensor, groups: RowGroups | None) -> torch.Tensor:
        """[num_tokens, num_heads, plain_dim] to [num_tokens, num_heads, rank]: in place of products with keys."""
        return _multiply(queries, _loaded(self._to_latents), groups)

    def to_values(self, latents: torch.Tensor, groups: RowGroups | None) -> torch.Tensor:
        """[num_tokens, num_heads, rank] to [num_tokens, num_heads, value_dim]."""
        return _multiply(latents, _loaded(self._to_values), groups)

    def _load(self, tensor: torch.Tensor) -> None:
        settings = self._settings
        both = tensor.to(self._device, self._dtype).view(len(self._own), -1, settings.rank)
        keys, values = both.split([settings.plain_dim, settings.value_dim], dim=1)
        is_invariant = packing().is_batch_invariant
        self._to_latents = pack_experts(keys.transpose(1, 2).contiguous(), None, is_invariant)
        self._to_values = pack_experts(values.contiguous(), None, is_invariant)


def _loaded(packed: PackedExperts | None) -> PackedExperts:
    if packed is None:
        raise RuntimeError("the products of the heads have no weights yet")
    return packed


def _multiply(x: torch.Tensor, heads: PackedExperts, groups: RowGroups | None) -> torch.Tensor:
    """The product of each head. Heads that are packed apart take runs of rows: half the time of gathered ones."""
    layers = expert_layers(heads)
    if groups is None and layers is not None:
        by_head = x.transpose(0, 1).contiguous()
        return torch.stack([layer(rows) for layer, rows in zip(layers, by_head, strict=True)], dim=1)
    if groups is None:
        raise RuntimeError("heads that are packed together need groups of rows")
    return grouped_linear(x.flatten(0, 1), heads, groups).view(*x.shape[:2], -1)


def _rotated(settings: LatentSettings) -> torch.Tensor:
    return rotary_order(settings.rotary_dim, is_interleaved=settings.is_interleaved)


def _query_order(settings: LatentSettings) -> torch.Tensor:
    """The checkpoint's row of each output: all heads without RoPE, then all heads' parts with it."""
    size = settings.plain_dim + settings.rotary_dim
    starts = torch.arange(settings.num_heads)[:, None] * size
    plain = starts + torch.arange(settings.plain_dim)
    return torch.cat((plain.flatten(), (starts + settings.plain_dim + _rotated(settings)).flatten()))


def _query_outputs(settings: LatentSettings, heads: range) -> list[range]:
    """The outputs of these heads in that order."""
    first = settings.num_heads * settings.plain_dim
    rotated = spread(heads, settings.rotary_dim)
    return [spread(heads, settings.plain_dim), range(first + rotated.start, first + rotated.stop)]
