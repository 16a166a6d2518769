"""Contents of the KV storage for a model, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from llmstack_model_runner.layers.attention_metadata import LayerCache
from llmstack_model_runner.layers.mixer import StateTensor
from llmstack_model_runner.layers.sharding import sharding
from llmstack_types import KVTensorSpec
from llmstack_types.vocabulary import KVGroupKind

KVCaches = list[LayerCache]

_INDEX_KEYS = "index_keys"


class TokenTensor(NamedTuple):
    """One tensor of a layer's memory for each token, as [num_heads, width].

    Attributes:
        name: Such as `keys`.
        num_heads: Several ranks may have the same head, where there are fewer than ranks.
    """

    name: str
    num_heads: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """The memory of one layer in the KV storage.

    Attributes:
        tensors: Of each token.
        sliding_window: How many tokens a token attends to; None for all.
        states: Of all tokens together, for a layer of the kind `state`, which keeps nothing else.
    """

    tensors: tuple[TokenTensor, ...] = ()
    kind: KVGroupKind = "full"
    sliding_window: int | None = None
    states: tuple[StateTensor, ...] = ()

    def block_tensors(self, block_size: int, dtype: str) -> tuple[KVTensorSpec, ...]:
        """The tensors of a block of so many tokens, or of a state."""
        if self.states:
            return tuple(KVTensorSpec(*tensor) for tensor in self.states)
        return tuple(KVTensorSpec(name, (heads, block_size, width), dtype) for name, heads, width in self.tensors)


def keys_and_values(num_kv_heads: int, head_dim: int, sliding_window: int | None = None) -> LayerKVSpec:
    """A layer with keys and values of one shape."""
    tensors = tuple(TokenTensor(name, num_kv_heads, head_dim) for name in ("keys", "values"))
    return LayerKVSpec(tensors, sliding_window=sliding_window)


def one_latent(width: int, index_dim: int = 0) -> LayerKVSpec:
    """A layer whose heads compute keys and values from one vector per token.

    `index_dim`: Width of an indexer's key of each token; 0 for a layer without one.
    """
    index_keys = (TokenTensor(_INDEX_KEYS, 1, index_dim),) if index_dim else ()
    return LayerKVSpec((TokenTensor("latent", 1, width), *index_keys), "latent")


@dataclass(frozen=True, slots=True)
class ModelKVSpec:
    """The memory of a model in the KV storage, and its limits.

    Attributes:
        layers: Of each layer.
        vocab_size: Width of the logits.
        max_model_len: Number of positions that the model supports.
        model_layers: Of all stages' layers, if a stage has only some of them.
        first_layer: Number in the model of this stage's first layer.
        num_selected: Tokens that a token attends to in a longer context, where an indexer selects them; None for all.
    """

    layers: tuple[LayerKVSpec, ...]
    vocab_size: int
    max_model_len: int
    model_layers: tuple[LayerKVSpec, ...] = ()
    first_layer: int = 0
    num_selected: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return len(self.layers)

    @property
    def first_attention(self) -> int | None:
        """The first layer that keeps something of each token; None where all of this stage have states."""
        return next((number for number, layer in enumerate(self.layers) if layer.kind != "state"), None)

    @property
    def head_dim(self) -> int:
        """Width of a key; 0 without attention over a KV storage."""
        return next((layer.tensors[0].width for layer in self.layers if layer.kind != "state"), 0)

    @property
    def index_dim(self) -> int:
        """Width of an indexer's key; 0 without one."""
        tensors = (tensor for layer in self.layers for tensor in layer.tensors)
        return next((tensor.width for tensor in tensors if tensor.name == _INDEX_KEYS), 0)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens a token attends to; None for all."""
        return tuple(layer.sliding_window for layer in self.layers)

    def of_rank(self, num_heads: int) -> ModelKVSpec:
        """The part of this context's rank, of a spec of the whole model with so many query heads.

        Raises:
            ValueError: Heads or layers cannot be shared out.
        """
        own = sharding()

        def of_layer(layer: LayerKVSpec) -> LayerKVSpec:
            heads = [len(own.heads(num_heads, tensor.num_heads)[1]) for tensor in layer.tensors]
            tensors = [tensor._replace(num_heads=count) for tensor, count in zip(layer.tensors, heads, strict=True)]
            return replace(layer, tensors=tuple(tensors))

        layers = tuple(of_layer(layer) for layer in self.layers)
        stage = own.layers(len(layers))
        return replace(
            self,
            layers=layers[stage.start : stage.stop],
            model_layers=layers if len(stage) < len(layers) else (),
            first_layer=stage.start,
        )
