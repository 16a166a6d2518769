"""Selection of keys in PyTorch: what every backend computes, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from llmstack_kernels.graph_safety import host_stands_in
from llmstack_kernels.key_selection import SelectionInputs

_MAX_SCORES = 1 << 25
"""Of all heads at once: 128 MiB."""


def select_keys(inputs: SelectionInputs) -> torch.Tensor:  # [num_tokens, num_selected] int32
    """Row by row, as many tokens at once as memory allows. Missing lists are read from the tensors."""
    query = inputs.query
    out = torch.empty((query.shape[0], inputs.num_selected), dtype=torch.int32, device=query.device)
    with host_stands_in():
        starts = inputs.query_start_loc_list or inputs.query_start_loc.tolist()
        lengths = inputs.seq_lens_list or inputs.seq_lens.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            keys = _context(inputs, row, lengths[row])
            step = max(1, _MAX_SCORES // (query.shape[1] * max(1, lengths[row])))
            for first in range(start, end, step):
                tokens = slice(first, min(first + step, end))
                out[tokens] = _select(inputs, tokens, keys, lengths[row] - end + first)
    return out


def _context(inputs: SelectionInputs, row: int, seq_len: int) -> torch.Tensor:  # [seq_len, head_dim] float32
    block_size = inputs.key_cache.shape[2]
    blocks = inputs.key_cache[inputs.block_tables[row, : -(-seq_len // block_size)].long(), 0]
    keys = blocks.flatten(0, 1)[:seq_len].float()
    return keys if inputs.key_scale is None else keys * inputs.key_scale


def _select(inputs: SelectionInputs, tokens: slice, keys: torch.Tensor, first_position: int) -> torch.Tensor:
    """`first_position`: That of the first of these tokens in its context."""
    by_head = torch.relu(inputs.query[tokens].float() @ keys.T)  # [num_tokens, num_heads, seq_len]
    scores = (inputs.weights[tokens][:, None] @ by_head).squeeze(1)
    num_seen = torch.arange(len(scores), device=scores.device)[:, None] + first_position + 1
    positions = torch.arange(keys.shape[0], device=scores.device)
    scores = scores.masked_fill(positions >= num_seen, float("-inf"))
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : inputs.num_selected]
    best = torch.sort(best.masked_fill(best >= num_seen, keys.shape[0]), dim=-1).values
    best = best.masked_fill(best >= num_seen, 0)
    return torch.nn.functional.pad(best, (0, inputs.num_selected - best.shape[1]))
