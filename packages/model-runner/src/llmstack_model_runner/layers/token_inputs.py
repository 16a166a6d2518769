"""Vectors of the tokens that every layer of a model adds to its residual."""

from __future__ import annotations

import torch

from llmstack_model_runner.layers.embedding import Embedding
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots


class TokenInputs:
    """One vector per token and layer: half a table's row, half a projection of the token's embedding.

    Source: the per-layer embeddings of Gemma 3n and Gemma 4.
    """

    def __init__(
        self,
        prefix: str,
        num_rows: int,
        hidden_size: int,
        num_layers: int,
        norm: RMSNorm,
        pad_id: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the tensors, such as `model.`; `norm` is that of the projections, as wide as a vector.

        `pad_id`: The token whose row counts where a vector of an encoder stands.
        """
        self._pad_id = pad_id
        size = len(norm.weight)
        self._shape, self._norm = (num_layers, size), norm
        self._table = Embedding(
            f"{prefix}embed_tokens_per_layer",
            num_rows,
            num_layers * size,
            dtype=dtype,
            device=device,
            scale=size**0.5,
            is_vocabulary=True,
        )
        parts = {f"{prefix}per_layer_model_projection": num_layers * size}
        self._projection = Linear(hidden_size, parts, has_bias=False, dtype=dtype, device=device)
        self._projection_scale, self._half = Scale(hidden_size**-0.5, device), Scale(2.0**-0.5, device)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the table, the projection and the norm."""
        return collect_slots([self._table, self._projection, self._norm])

    def __call__(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        vectors: StepVectors | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_layers, size]
        """The vectors of all layers; `hidden` are the tokens' embeddings, and `vectors` where it has others."""
        if vectors is not None:
            token_ids = token_ids.index_fill(0, vectors.places.to(token_ids.device), self._pad_id)
        projected = self._projection_scale(self._projection(hidden)).view(-1, *self._shape)
        return self._half(self._norm(projected) + self._table(token_ids).view(-1, *self._shape))
