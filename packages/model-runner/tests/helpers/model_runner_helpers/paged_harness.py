"""Harness that runs a model step by step over a small paged KV storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.mixer import StateTensor
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models.base import CausalLM


class PagedHarness:
    """Holds block tables and KV storage; the storage starts full of NaN, so that a read of an unwritten slot shows."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, *, num_blocks: int = 64, block_size: int = 4) -> None:
        spec = model.kv_spec
        self._has_states = False
        self._num_state_blocks = num_blocks
        self._num_states_taken = 0
        self._state_blocks: dict[str, int] = {}
        self._model = model
        self._block_size = block_size
        self._kv_caches = [
            tuple(
                torch.full((num_blocks, heads, block_size, width), torch.nan, dtype=dtype)
                for _, heads, width in layer.tensors
            )
            or self._states_of(layer.states, num_blocks)
            for layer in spec.layers
        ]
        generator = torch.Generator().manual_seed(0)
        self._free_block_ids: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
        self._block_tables: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}

    def _states_of(self, states: Sequence[StateTensor], num_blocks: int) -> tuple[torch.Tensor, ...]:
        """Block 0 is the state before the first token."""
        tensors = [torch.full((num_blocks, *shape), torch.nan, dtype=getattr(torch, name)) for _, shape, name in states]
        for tensor in tensors:
            tensor[0] = 0
        self._has_states = True
        return tuple(tensors)

    def step(
        self, rows: Sequence[tuple[str, Sequence[int]]], vectors: StepVectors | None = None, shift: Sequence[int] = ()
    ) -> torch.Tensor:
        """Compute the next tokens of each named request; logits of every token, float32 [num_tokens, vocab_size].

        `shift`: How far each token's position is from its place.
        """
        token_ids = [token_id for _, tokens in rows for token_id in tokens]
        positions = [self._num_computed.get(name, 0) + i for name, tokens in rows for i in range(len(tokens))]
        positions = [sum(both) for both in zip(positions, shift or [0] * len(positions), strict=True)]
        metadata = replace(self._metadata(rows), vectors=vectors)
        hidden = self._model.forward(torch.tensor(token_ids), torch.tensor(positions), metadata, self._kv_caches)
        return self._model.compute_logits(hidden)

    def greedy(self, prompt: Sequence[int], num_tokens: int, name: str = "greedy") -> list[int]:
        """Prefill a new request, then decode `num_tokens` tokens by highest logit."""
        output = [int(self.step([(name, prompt)])[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step([(name, output[-1:])])[-1].argmax()))
        return output

    def _metadata(self, rows: Sequence[tuple[str, Sequence[int]]]) -> AttentionMetadata:
        starts, seq_lens, slots = [0], [], []
        for name, tokens in rows:
            first = self._num_computed.get(name, 0)
            seq_lens.append(first + len(tokens))
            starts.append(starts[-1] + len(tokens))
            slots += [self._slot(name, position) for position in range(first, seq_lens[-1])]
            self._num_computed[name] = seq_lens[-1]
        tables = [self._block_tables[name] for name, _ in rows]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(padded, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            query_start_loc_list=starts,
            seq_lens_list=seq_lens,
            max_query_len=max(len(tokens) for _, tokens in rows),
            max_seq_len=max(seq_lens),
            states=self._state_rows(starts, [(name, len(tokens)) for name, tokens in rows])
            if self._has_states
            else None,
        )

    def _state_rows(self, starts: list[int], rows: Sequence[tuple[str, int]]) -> StateRows:
        """Each row writes to a block that has not been used for long."""
        sources = [self._state_blocks.get(name, 0) for name, _ in rows]
        for name, _ in rows:
            self._num_states_taken += 1
            self._state_blocks[name] = 1 + self._num_states_taken % (self._num_state_blocks - 1)
        targets = [self._state_blocks[name] for name, _ in rows]
        counts = [count for _, count in rows]
        states = (torch.tensor(values) for values in (sources, targets, counts))
        return StateRows(torch.tensor(starts, dtype=torch.int32), *states)

    def _slot(self, name: str, position: int) -> int:
        table = self._block_tables.setdefault(name, [])
        index, offset = divmod(position, self._block_size)
        if index == len(table):
            table.append(self._free_block_ids.pop())
        return table[index] * self._block_size + offset


def check_neighbours(
    harness: PagedHarness,
    tokens: Sequence[int],
    expected: torch.Tensor,  # [len(tokens), vocab_size]
    close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Three requests with these tokens, in chunks, whole and in decodes beside one another, have their logits."""
    close(harness.step([("a", tokens[:1]), ("b", tokens[:11])]), torch.cat((expected[:1], expected[:11])))
    both = torch.cat((expected[11:12], expected[1:8], expected))
    close(harness.step([("b", tokens[11:12]), ("a", tokens[1:8]), ("c", tokens)]), both)
    for position in range(12, len(tokens)):
        rows = [("a", [tokens[position - 4]]), ("b", [tokens[position]])]
        close(harness.step(rows), expected[[position - 4, position]])
