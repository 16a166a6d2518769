"""Selection of keys by an indexer.

Attention then reads these alone of a long context: DeepSeek V3.2's "lightning indexer" (arXiv 2512.02556, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmstack_kernels.dispatch import implementation


class SelectionInputs(NamedTuple):
    """Queries of an indexer, and the cache of its keys. Rows are those of `AttentionInputs`.

    Attributes:
        weights: Factors of each head's scores, the scale included; their sign counts.
        num_selected: Keys that a token attends to, where its context has more.
        key_scale: With a cache of float8_e4m3fn: a key is the stored number times it.
    """

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    weights: torch.Tensor  # [num_tokens, num_heads] float32
    key_cache: torch.Tensor  # [num_blocks, 1, block_size, head_dim]
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    num_selected: int
    query_start_loc_list: Sequence[int] | None = None
    seq_lens_list: Sequence[int] | None = None
    key_scale: torch.Tensor | None = None  # [1] float32

    def check(self) -> None:
        """Raises ValueError if shapes do not fit together."""
        query, keys = self.query, self.key_cache
        if query.ndim != 3 or keys.ndim != 4 or keys.shape[1] != 1 or keys.shape[3] != query.shape[2]:
            raise ValueError(f"A query of shape {tuple(query.shape)} does not fit a cache of {tuple(keys.shape)}.")
        if self.weights.shape != query.shape[:2] or self.weights.dtype != torch.float32:
            raise ValueError(f"weights must be float32 of shape {tuple(query.shape[:2])}.")
        if self.num_selected < 1:
            raise ValueError(f"num_selected must be at least 1, got {self.num_selected}.")


def select_keys(inputs: SelectionInputs) -> torch.Tensor:  # [num_tokens, num_selected] int32
    """The positions of the keys with the highest scores, ascending; of a shorter context all of them, then zeros.

    A key's score is the sum over the heads of weight * max(0, query · key), in float32. Of equal scores the earlier
    keys are taken.

    Raises:
        ValueError: The inputs do not fit together.
    """
    inputs.check()
    chosen: torch.Tensor = implementation("key_selection", inputs.query.device.type).select_keys(inputs)
    return chosen
