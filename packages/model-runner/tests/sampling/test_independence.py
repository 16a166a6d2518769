"""A draw depends on the seed and the output index: not on the batch, its order, or when a request came."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, SamplingRows
from llmstack_types import SamplingParams

VOCAB_SIZE = 500
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.4]),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 5, 300]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02]),
    typical_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.5, 2.0]),
    infill=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([None, {3: 4.0}]),
    allowed_token_ids=st.sampled_from([None, (1, 2, 3, 400)]),
    bad_words_token_ids=st.sampled_from([(), ((7,), (0, 3))]),
    min_tokens=st.sampled_from([0, 5]),
)
REQUEST = st.tuples(PARAMS, st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6), st.integers(0, 1000))


def sample(requests: list[tuple[SamplingParams, list[int], int]], order: list[int]) -> list[int]:
    """Tokens of the requests at `order`, each with logits of its own."""
    rows = make_sampling_rows(
        [one[0] for one in requests], [one[1] for one in requests], VOCAB_SIZE, eos_token_ids=(2,)
    )
    logits = torch.stack(
        [torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(requests[row][2])) for row in order]
    )
    output_indices = np.array([len(requests[row][1]) - 1 for row in order])
    return [int(token) for token in Sampler().sample(logits, rows.metadata(np.array(order), output_indices)).token_ids]


@settings(deadline=None, max_examples=50)
@given(st.lists(REQUEST, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_neither_order_nor_neighbours_change_a_token(
    requests: list[tuple[SamplingParams, list[int], int]], random: object
) -> None:
    order = list(range(len(requests)))
    together = sample(requests, order)
    random.shuffle(order)  # type: ignore[attr-defined]  # a `random.Random`
    assert sample(requests, order) == [together[row] for row in order]
    half = len(order) // 2
    assert sample(requests, order[:half]) + sample(requests, order[half:]) == [together[row] for row in order]
    assert [sample([request], [0])[0] for request in requests] == together


@settings(deadline=None, max_examples=20)
@given(PARAMS.filter(lambda params: not params.is_greedy), st.integers(1, 14))
def test_a_resumed_request_continues_as_if_it_had_not_been_preempted(params: SamplingParams, num_before: int) -> None:
    logits = torch.randn(15, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    whole: list[int] = []
    for index in range(15):  # resumed for each token
        rows = make_sampling_rows([params], [[0, *whole]], VOCAB_SIZE, eos_token_ids=(2,))
        whole += draw(rows, logits, index)
    # Its later tokens lie in the array from the start, which are not read before they are generated.
    rows = make_sampling_rows(
        [params], [[0, *whole[:num_before]]], VOCAB_SIZE, drafts=[whole[num_before:]], eos_token_ids=(2,)
    )
    for index in range(num_before, 15):
        assert draw(rows, logits, index) == [whole[index]]
        rows.penalties.count_tokens(np.array([0]), np.array([whole[index]]))


def draw(rows: SamplingRows, logits: torch.Tensor, index: int) -> list[int]:
    metadata = rows.metadata(np.array([0]), np.array([index]))
    return [int(token) for token in Sampler().sample(logits[index : index + 1].clone(), metadata).token_ids]
