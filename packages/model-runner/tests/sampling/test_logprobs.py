"""Log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, target_probabilities
from llmstack_model_runner.sampling.logprobs import MIN_LOGPROB, gather_logprobs
from llmstack_types import SamplingParams


def test_entries_equal_log_softmax_and_name_the_most_likely() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    entries = gather_logprobs(logits, torch.tensor([4, 7, 9]), [0, 2, 5]).to_lists()
    for row, (entry, chosen, num_top) in enumerate(zip(entries, [4, 7, 9], [0, 2, 5], strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert entry.token_ids == (chosen, *order[:num_top])
        assert entry.logprobs == pytest.approx([float(expected[row, i]) for i in entry.token_ids], abs=1e-5)
        assert entry.rank == order.index(chosen) + 1


def test_named_tokens_are_reported_in_place_of_the_most_likely_ones() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=[9, 3, 9, 70]),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=1),
    ]
    metadata = make_sampling_rows(params, [[0]] * 3, 50).metadata(np.arange(3), np.zeros(3, dtype=np.int64))
    output = Sampler().sample(logits.clone(), metadata)
    assert output.logprobs is not None
    named, best = output.logprobs.to_lists()
    expected, chosen = logits.log_softmax(-1), logits.argmax(-1).tolist()
    assert (named.token_ids, best.token_ids) == ((chosen[0], 9, 3), (chosen[2], chosen[2]))
    assert named.logprobs == tuple(expected[0, list(named.token_ids)].tolist())


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    (entry,) = gather_logprobs(logits, torch.tensor([1]), [-1]).to_lists()
    assert entry.logprobs == (MIN_LOGPROB, 0.0, MIN_LOGPROB, MIN_LOGPROB)
    assert entry.token_ids == (1, 0, 1, 2)


def test_equally_likely_tokens_share_the_better_rank_and_come_by_id() -> None:
    (entry,) = gather_logprobs(torch.zeros(1, 8), torch.tensor([5]), [3]).to_lists()
    assert entry.rank == 1
    assert entry.token_ids == (5, 0, 1, 2)


def test_values_are_bit_equal_to_log_softmax_as_transformers_computes_it() -> None:
    logits = torch.randn(4, 50_257, generator=torch.Generator().manual_seed(0)) * 5
    chosen = torch.tensor([0, 50_256, 7, 9])
    expected = torch.nn.functional.log_softmax(logits, dim=-1)
    found = gather_logprobs(logits, chosen, [20] * 4)
    assert torch.equal(found.chosen_logprobs, expected.gather(-1, chosen[:, None]).squeeze(-1))
    assert torch.equal(found.top_logprobs, expected.sort(dim=-1, descending=True).values[:, :20])


def test_processed_logprobs_are_those_a_token_was_chosen_by() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=1.8, logit_bias={4: -3.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, temperature=0.7, top_k=5, logprobs=3, presence_penalty=1.0),
        SamplingParams(seed=2, top_p=0.9),
    ]
    rows = make_sampling_rows(params, [[0, 9]] * 4, 50)
    metadata = rows.metadata(np.arange(4), np.ones(4, dtype=np.int64))
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    random_ones = target_probabilities(logits, metadata)[2].log()
    greedy = logits[0].clone()
    greedy[4] -= 3.0
    greedy[[0, 9]] = torch.where(greedy[[0, 9]] > 0, greedy[[0, 9]] / 1.8, greedy[[0, 9]] * 1.8)
    output = Sampler("processed_logprobs").sample(logits.clone(), metadata)
    assert output.logprobs is not None
    assert output.logprob_rows == (0, 2)
    for entry, expected in zip(output.logprobs.to_lists(), (greedy.log_softmax(-1), random_ones), strict=True):
        assert entry.logprobs == pytest.approx([float(expected[token_id]) for token_id in entry.token_ids], abs=1e-5)
        assert entry.token_ids[1:] == tuple(expected.argsort(descending=True)[:3].tolist())


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="raw_logprobs or processed_logprobs"):
        Sampler("raw_logits")
