"""Buffers of captured decode steps, against the inputs that any step would have."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.steps.decode_buffers import DecodeBuffers
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_types import KVCacheGroupSpec, NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 4, 64, 400
GROUPS = {1: (), 2: (KVCacheGroupSpec((0, 2)), KVCacheGroupSpec((1,), sliding_window=8))}


def place(batch: InputBatch, lengths: list[int]) -> None:
    """Adds a request of each length, with blocks in random order."""
    block_ids = iter(np.random.default_rng(sum(lengths)).permutation(NUM_BLOCKS).tolist())
    new, scheduled = [], []
    for index, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE) * len(batch.block_tables)
        token_ids = [100 * index + place for place in range(length)]
        new.append(NewRequest(f"r{index}", token_ids, 1, SamplingParams()))
        scheduled.append(ScheduledRequest(f"r{index}", 0, length, [next(block_ids) for _ in range(num_blocks)]))
    batch.update(SchedulerOutput(1, new, scheduled, total_num_scheduled_tokens=sum(lengths)))


@given(
    st.sampled_from([1, 2]),
    st.lists(st.lists(st.integers(1, MAX_MODEL_LEN), min_size=3, max_size=3), min_size=1, max_size=3),
)
def test_the_buffers_have_what_is_prepared_for_any_step(num_groups: int, batches: list[list[int]]) -> None:
    """One set of buffers for several batches, so that what an earlier step left is there."""
    buffers = None
    for lengths in batches:
        batch = InputBatch(8, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, vocab_size=1000, groups=GROUPS[num_groups])
        place(batch, lengths)
        scheduled = [ScheduledRequest(f"r{index}", length - 1, 1, []) for index, length in enumerate(lengths)]
        step = batch.update(SchedulerOutput(2, [], scheduled, total_num_scheduled_tokens=len(scheduled)))
        expected = prepare_inputs(batch, step, torch.device("cpu"))
        buffers = buffers or DecodeBuffers(batch, len(lengths), MAX_MODEL_LEN // BLOCK_SIZE)
        buffers.fill(batch, step)
        found = buffers.inputs
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.positions, expected.positions)
        assert torch.equal(found.attention_metadata.seq_lens, expected.attention_metadata.seq_lens)
        assert found.attention_metadata.layer_to_group == expected.attention_metadata.layer_to_group
        for own, theirs in zip(
            found.attention_metadata.groups or [found.attention_metadata],
            expected.attention_metadata.groups or [expected.attention_metadata],
            strict=True,
        ):
            assert torch.equal(own.slot_mapping, theirs.slot_mapping)
            for row, length in enumerate(lengths):
                end = -(-length // BLOCK_SIZE)
                assert torch.equal(own.block_tables[row, :end], theirs.block_tables[row, :end])
