"""Draft head: a further decoder layer, which guesses the token after the next.

DeepSeek-V3 is trained with it ("multi-token prediction", section 2.2 of its report), and Qwen3-Next after it. At each
place it joins the model's hidden state with the embedding of the token that follows, and its own output takes
the place of the hidden state for a further guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from llmstack_model_runner.layers import Linear, RMSNorm, RotaryEmbedding, WeightSlot, collect_slots, plan_layers
from llmstack_model_runner.layers.adaptation import adapted
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec, ModelKVSpec
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of the tensors in a checkpoint.

    Attributes:
        layer: Prefix of the decoder layer.
        embedding_norm: Of embeddings of tokens.
        hidden_norm: Of hidden states.
        join: The layer that joins both, embeddings first.
        norm: Of what the decoder layer gives; None where that is the model's last norm.
        is_hidden_first: It joins hidden states first.
        is_dense: The decoder layer has no experts, whatever the model's have.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str | None
    is_hidden_first: bool = False
    is_dense: bool = False


class DraftHead:
    """The layer and what surrounds it; embedding and output head are the model's.

    Attributes:
        kv_spec: What the layer keeps in a storage.
        share: Its weights over all others of the model.
    """

    def __init__(
        self,
        names: HeadNames,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
        last_norm: RMSNorm,
    ) -> None:
        """`settings` are those of the decoder layer, and `rotary` is that of its `rope`; `last_norm` is the model's."""
        size = settings.hidden_size
        settings = replace(settings, experts=None) if names.is_dense else settings
        with adapted(None):  # adapters change the model alone
            self._embedding_norm = settings.norm(names.embedding_norm, size, dtype, device)
            self._hidden_norm = settings.norm(names.hidden_norm, size, dtype, device)
            self._join = Linear(2 * size, {names.join: size}, has_bias=False, dtype=dtype, device=device)
            self._layer = settings.make_draft_layer(names.layer, rotary, dtype, device)
        self.share = 0.0
        self._is_hidden_first = names.is_hidden_first
        self._has_own_norm = names.norm is not None
        self._norm = last_norm if names.norm is None else settings.norm(names.norm, size, dtype, device)
        self._window = settings.sliding_window
        spec = settings.kv_spec(dtype)
        if spec is None:
            raise ValueError("a draft head keeps keys and values")
        self.kv_spec: LayerKVSpec = ModelKVSpec((spec,), 0, 0).of_rank(settings.num_heads).layers[0]

    def note_share(self, slots: Mapping[str, WeightSlot]) -> None:
        """Reads `share` from the slots of the whole model, before any is filled."""
        own = sum(slot.num_elements for slot in self.slots().values())
        self.share = own / max(sum(slot.num_elements for slot in slots.values()) - own, 1)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        own = [self._norm] if self._has_own_norm else []
        return collect_slots([self._embedding_norm, self._hidden_norm, self._join, self._layer, *own])

    def __call__(
        self,
        embedded: torch.Tensor,  # [num_tokens, hidden_size]
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens]
        metadata: AttentionMetadata,
        kv_caches: KVCaches,  # of one layer
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states after its norm, at each place from that of the model and the token that follows."""
        parts = [self._embedding_norm(embedded), self._hidden_norm(hidden)]
        joined = self._join(torch.cat(parts[::-1] if self._is_hidden_first else parts, dim=-1))
        (plan,) = plan_layers(metadata, kv_caches, [self._window])
        return self._norm.add(*self._layer(joined, None, LayerStep(positions, kv_caches[0], *plan)))[0]
