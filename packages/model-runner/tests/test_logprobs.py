"""Log-probabilities."""

from __future__ import annotations

import pytest
import torch

from llmstack_model_runner.sampling.logprobs import MIN_LOGPROB, gather_logprobs


def test_entries_equal_log_softmax_and_name_the_most_likely() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    entries = gather_logprobs(logits, torch.tensor([4, 7, 9]), [0, 2, 5]).to_lists()
    for row, (entry, chosen, num_top) in enumerate(zip(entries, [4, 7, 9], [0, 2, 5], strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert entry.token_ids == (chosen, *order[:num_top])
        assert entry.logprobs == pytest.approx([float(expected[row, i]) for i in entry.token_ids], abs=1e-5)
        assert entry.rank == order.index(chosen) + 1


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    (entry,) = gather_logprobs(logits, torch.tensor([1]), [-1]).to_lists()
    assert entry.logprobs == (MIN_LOGPROB, 0.0, MIN_LOGPROB, MIN_LOGPROB)
    assert entry.token_ids == (1, 0, 1, 2)


def test_equally_likely_tokens_share_the_better_rank_and_come_by_id() -> None:
    (entry,) = gather_logprobs(torch.zeros(1, 8), torch.tensor([5]), [3]).to_lists()
    assert entry.rank == 1
    assert entry.token_ids == (5, 0, 1, 2)
