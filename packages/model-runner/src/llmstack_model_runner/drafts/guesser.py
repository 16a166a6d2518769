"""Protocol of heads that guess the token after the next from hidden states."""

from __future__ import annotations

from typing import Protocol

import torch

from llmstack_kernels.argmax import argmax
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.eagle import EagleHead
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec


class Guesser(Protocol):
    """A layer or a few, with keys and values of their own, beside a served model."""

    @property
    def layers(self) -> tuple[LayerKVSpec, ...]:
        """The memory of each layer for a token."""
        ...

    @property
    def state_size(self) -> int:
        """Numbers of a state."""
        ...

    @property
    def has_moved_positions(self) -> bool:
        """Whether positions are the served model's where pictures move them; else they are places."""
        ...

    def cost(self, weight_bytes: int) -> float:
        """The bytes that it reads for a draft of every row, over those of a served model's step."""
        ...

    def hold_positions(self, num_positions: int) -> None:
        """Computes tables for so many positions."""
        ...

    def read_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states of the places that the served model has just computed: [n, hidden_size] to [n, state_size]."""
        ...

    def advance(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # fmt: skip
        """States that guess the token after the next, from those at these places and the tokens that follow them."""
        ...

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens: [n, state_size] to int64 [n]."""
        ...


class OwnLayer:
    """The layer of the served model's checkpoint that guesses a further token."""

    def __init__(self, model: CausalLM) -> None:
        """Raises ValueError if the model has none."""
        found = model.draft_head_spec()
        if found is None:
            raise ValueError(
                f"the method 'mtp' needs a model with a layer that guesses a further token, as Qwen3-Next, Qwen 3.5 "
                f"and DeepSeek V3 have; {type(model).__name__} has none"
            )
        self._model, self._share = model, found[1]
        self.layers: tuple[LayerKVSpec, ...] = (found[0],)
        self.state_size, self.has_moved_positions = model.vector_size or 0, True

    def cost(self, weight_bytes: int) -> float:
        """The layer's weights over those of the served model, as if both had the same precision."""
        return self._share

    def hold_positions(self, num_positions: int) -> None:
        """Does nothing: the tables are the model's."""

    def read_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def advance(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # fmt: skip
        return self._model.draft(token_ids, states, positions, metadata, kv_caches)

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        return argmax(self._model.compute_logits(states))[1]


class EagleLayers:
    """A head of EAGLE, which has a checkpoint of its own, beside the model whose states it reads."""

    def __init__(self, head: EagleHead, head_bytes: int, model: CausalLM) -> None:
        """Raises ValueError if the model does not give what the head reads."""
        self._head, self._head_bytes, self._model = head, head_bytes, model
        if head.kept_layers:
            model.keep_states(head.kept_layers)
        self.layers, self.state_size, self.has_moved_positions = head.kv_spec.layers, head.size, False

    def cost(self, weight_bytes: int) -> float:
        """Its bytes over those of the served model."""
        return self._head_bytes / max(weight_bytes, 1)

    def hold_positions(self, num_positions: int) -> None:
        """Computes the tables of its rotary embedding."""
        if self._head.rotary is not None:
            self._head.rotary.hold_positions(num_positions)

    def read_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.read_states(self._model, hidden)

    def advance(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # fmt: skip
        return self._head.advance(self._model, token_ids, states, positions, metadata, kv_caches)

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        found, target_ids = argmax(self._head.guess(self._model, states))[1], self._head.target_ids
        return found if target_ids is None else target_ids[found]
