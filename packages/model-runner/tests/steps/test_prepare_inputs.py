"""Flattening a step, against what each request alone says."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_types import NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def make_batch() -> InputBatch:
    return InputBatch(8, max_model_len=64, block_size=BLOCK_SIZE, num_blocks=200, vocab_size=1000)


def test_a_prefill_of_five_and_two_decodes_are_seven_tokens_at_the_right_positions() -> None:
    """The worked example GOL-11: the decodes stand at num_computed_tokens, not at 0."""
    batch = make_batch()
    requests = [
        NewRequest("a", [10, 11, 12, 13, 14], 5, SamplingParams()),
        NewRequest("b", [20, 21, 22, 23], 3, SamplingParams()),
        NewRequest("c", [30, 31, 32, 33, 34, 35], 5, SamplingParams()),
    ]
    rows = [
        ScheduledRequest("a", 0, 5, [0, 1]),
        ScheduledRequest("b", 3, 1, [2]),
        ScheduledRequest("c", 5, 1, [3, 4]),
    ]
    inputs = prepare_inputs(batch, batch.update(SchedulerOutput(1, requests, rows, total_num_scheduled_tokens=7)), CPU)
    metadata = inputs.attention_metadata
    assert inputs.token_ids.tolist() == [10, 11, 12, 13, 14, 23, 35]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 3, 5]
    assert metadata.slot_mapping.tolist() == [0, 1, 2, 3, 4, 11, 17]
    assert metadata.query_start_loc_list == metadata.query_start_loc.tolist() == [0, 5, 6, 7]
    assert metadata.seq_lens_list == metadata.seq_lens.tolist() == [5, 4, 6]
    assert (metadata.max_query_len, metadata.max_seq_len) == (5, 6)
    assert inputs.logits_indices.tolist() == [4, 5, 6]


ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 40)).map(
        lambda row: (row[0], min(row[1], row[0] - 1), min(row[2], row[0] - min(row[1], row[0] - 1)))
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_the_flat_batch_equals_each_request_computed_alone(rows: list[tuple[int, int, int]]) -> None:
    batch = make_batch()
    new, scheduled, expected = [], [], []
    block_ids = iter(np.random.default_rng(len(rows)).permutation(200).tolist())
    for index, (num_tokens, start, num_scheduled) in enumerate(rows):
        token_ids = list(range(index * 100, index * 100 + num_tokens))
        blocks = [next(block_ids) for _ in range(-(-(start + num_scheduled) // BLOCK_SIZE))]
        new.append(NewRequest(f"r{index}", token_ids, 1, SamplingParams()))
        scheduled.append(ScheduledRequest(f"r{index}", start, num_scheduled, blocks))
        positions = range(start, start + num_scheduled)
        expected.append([(token_ids[p], p, blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE) for p in positions])
    inputs = prepare_inputs(batch, batch.update(SchedulerOutput(1, new, scheduled)), CPU)
    metadata = inputs.attention_metadata
    flat = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), metadata.slot_mapping.tolist(), strict=True)
    assert list(flat) == [token for row in expected for token in row]
    sampling = [i for i, (num_tokens, start, num) in enumerate(rows) if start + num == num_tokens]
    assert inputs.sampling_indices.tolist() == sampling
    assert inputs.logits_indices.tolist() == [metadata.query_start_loc_list[i + 1] - 1 for i in sampling]
    for index, row in enumerate(scheduled):
        table = metadata.block_tables[index].tolist()
        assert table == row.new_block_ids + [0] * (len(table) - len(row.new_block_ids))
