"""The heads of an attention layer that one rank computes, as outputs and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_model_runner.layers.sharding import sharding, spread


class HeadSplit:
    """Outputs of the projections to queries, keys and values, and inputs of the one behind attention.

    Attributes:
        heads: This rank's query heads.
        kv_heads: This rank's KV heads.
        query_size: Features of its query heads.
        kv_size: Features of its KV heads.
        inputs: Features of all heads that are its own, of the projection behind attention.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """The split of the heads of the whole model; ValueError if they cannot be shared out."""
        self.heads, self.kv_heads = sharding().heads(num_heads, num_kv_heads)
        self.query_size, self.kv_size = len(self.heads) * head_dim, len(self.kv_heads) * head_dim
        self.inputs = spread(self.heads, head_dim)
        self._sizes = (num_heads * head_dim, num_kv_heads * head_dim)
        self._kv_run = spread(self.kv_heads, head_dim)

    def parts(self, names: Sequence[str]) -> dict[str, int]:
        """Outputs of each tensor in the checkpoint: one for queries, keys and values, or one each."""
        query_size, kv_size = self._sizes
        sizes = [query_size, kv_size, kv_size]
        return dict(zip(names, sizes if len(names) == 3 else [sum(sizes)], strict=True))

    def outputs(self, names: Sequence[str]) -> Mapping[str, Sequence[range]]:
        """This rank's outputs of each of these tensors."""
        if len(names) == 3:
            return dict(zip(names, ([self.inputs], [self._kv_run], [self._kv_run]), strict=True))
        query_size, kv_size = self._sizes
        keys, values = (
            range(self._kv_run.start + start, self._kv_run.stop + start) for start in (query_size, query_size + kv_size)
        )
        return {names[0]: [self.inputs, keys, values]}
