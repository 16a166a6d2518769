"""The heads of an attention layer that one rank computes, as outputs and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llmstack_model_runner.layers.sharding import sharding, spread


class HeadSplit:
    """Outputs of the projections to queries, keys and values, and inputs of the one behind attention.

    Attributes:
        heads: This rank's query heads.
        kv_heads: This rank's KV heads.
        query_size: Features of its query heads.
        kv_size: Features of its KV heads.
        inputs: Features of all heads that are its own, of the projection behind attention.
        gate_size: Features of the gates of its query heads; 0 without gates.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, has_gates: bool = False, has_pairs: bool = False
    ) -> None:
        """The split of the heads of the whole model; ValueError if they cannot be shared out.

        `has_gates`: The projection to queries has a gate behind each head, as wide as the head.
        `has_pairs`: RoPE rotates neighbouring numbers of the checkpoint; here it rotates the halves of a head.
        """
        self.heads, self.kv_heads = sharding().heads(num_heads, num_kv_heads)
        self.query_size, self.kv_size = len(self.heads) * head_dim, len(self.kv_heads) * head_dim
        self.inputs = spread(self.heads, head_dim)
        self._sizes = (num_heads * head_dim, num_kv_heads * head_dim)
        self._head_dim, self._has_pairs = head_dim, has_pairs
        self.gate_size = self.query_size if has_gates else 0
        self._kv_run = spread(self.kv_heads, head_dim)

    def parts(self, names: Sequence[str]) -> dict[str, int]:
        """Outputs of each tensor in the checkpoint: one for queries, keys and values, or one each."""
        query_size, kv_size = self._sizes
        sizes = [query_size * (2 if self.gate_size else 1), kv_size, kv_size]
        return dict(zip(names, sizes if len(names) == 3 else [sum(sizes)], strict=True))

    def outputs(self, names: Sequence[str]) -> Mapping[str, Sequence[range]]:
        """This rank's outputs of each of these tensors."""
        query_size, kv_size = self._sizes
        if len(names) == 3:
            gates = [range(self.inputs.start + query_size, self.inputs.stop + query_size)] if self.gate_size else []
            return dict(zip(names, ([self.inputs, *gates], [self._kv_run], [self._kv_run]), strict=True))
        keys, values = (
            range(self._kv_run.start + start, self._kv_run.stop + start) for start in (query_size, query_size + kv_size)
        )
        return {names[0]: [self.inputs, keys, values]}

    def orders(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The checkpoint's row for each output, where they are not in order: all queries, then all gates."""
        if self._has_pairs and len(names) == 3:
            paired = [torch.arange(size).view(-1, self._head_dim // 2, 2) for size in self._sizes]
            return {name: rows.transpose(1, 2).flatten() for name, rows in zip(names, paired, strict=False)}
        if not self.gate_size:
            return {}
        rows = torch.arange(2 * self._sizes[0]).view(-1, 2, self._head_dim)
        return {names[0]: rows.transpose(0, 1).flatten()}
