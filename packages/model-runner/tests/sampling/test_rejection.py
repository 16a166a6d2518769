"""Rejection sampling of drafts: what is kept is distributed as the model says, place by place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.sampling import RandomRows, Sampler, SamplingMetadata, target_probabilities
from llmstack_model_runner.sampling.rejection import NO_DRAFT, count_kept

NUM_DRAWS = 40_000
VOCAB_SIZE = 6


def keep(token_ids: list[int], drafts: list[int], is_good: list[bool] | None = None) -> list[int]:
    good = np.array([True] * len(token_ids) if is_good is None else is_good)
    targets = np.array([*drafts, NO_DRAFT])
    (num_kept,) = count_kept(np.array(token_ids), good, targets, np.array([len(token_ids)]))
    return token_ids[:num_kept]


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [([], [4]), ([4], [4, 5]), ([9], [4]), ([4, 5, 6], [4, 5, 6, 7]), ([4, 9, 6], [4, 5]), ([9, 5, 6], [4])],
)
def test_tokens_are_kept_up_to_the_first_wrong_draft(drafts: list[int], kept: list[int]) -> None:
    assert keep([4, 5, 6, 7][: len(drafts) + 1], drafts) == kept


def test_a_place_without_usable_probabilities_ends_its_row() -> None:
    assert keep([4, 5, 6], [4, 5], [True, False, True]) == [4, 5]


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=6,
)


@given(ROWS)
def test_rows_are_verified_each_for_itself(rows: list[list[tuple[int, int, bool]]]) -> None:
    expected = []
    for row in rows:
        last = len(row) - 1
        wrong = [place for place, (token, draft, good) in enumerate(row) if place == last or token != draft or not good]
        expected.append(wrong[0] + 1)
    flat = [entry for row in rows for entry in row]
    num_places = np.array([len(row) for row in rows])
    drafts = np.array([draft for _, draft, _ in flat])
    drafts[np.cumsum(num_places) - 1] = NO_DRAFT
    token_ids, is_good = np.array([token for token, _, _ in flat]), np.array([good for *_, good in flat])
    assert count_kept(token_ids, is_good, drafts, num_places).tolist() == expected


def draw_with_drafts(
    logits: torch.Tensor, drafts: list[int], **params: float
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Drawn tokens [NUM_DRAWS, num_places], how many of them are kept, and the probabilities of the places.

    One request per seed; its logits at each place are given, as if they depended on the drafts before.
    """
    num_places, vocab_size = logits.shape
    num_rows = NUM_DRAWS * num_places

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(num_rows, value, dtype=dtype)

    metadata = SamplingMetadata(
        random=RandomRows(
            rows=np.arange(num_rows),
            temperature=full(params.get("temperature", 1.0), np.float32),
            top_k=full(params.get("top_k", vocab_size), np.int64),
            top_p=full(params.get("top_p", 1.0), np.float64),
            min_p=full(params.get("min_p", 0.0), np.float32),
            typical_p=full(1.0, np.float64),
            top_n_sigma=full(params.get("top_n_sigma", -1.0), np.float64),
            infill_rules=full(None, np.object_),
            seeds=np.repeat(np.arange(NUM_DRAWS, dtype=np.uint64) + np.uint64(17), num_places),
            output_indices=np.tile(np.arange(num_places), NUM_DRAWS) + 3,
        )
    )
    all_logits = logits.repeat(NUM_DRAWS, 1)
    probabilities = target_probabilities(all_logits, metadata)[:num_places].double()
    sampled = Sampler().sample(all_logits, metadata)
    token_ids = sampled.token_ids.numpy()
    targets = np.tile([*drafts, NO_DRAFT], NUM_DRAWS)
    num_kept = count_kept(token_ids, sampled.is_good.numpy(), targets, np.full(NUM_DRAWS, num_places))
    return token_ids.reshape(NUM_DRAWS, num_places), num_kept, probabilities


def chi_square(token_ids: np.ndarray, probabilities: torch.Tensor) -> float:
    """Pearson's statistic of observed tokens; tokens of probability 0 must not occur."""
    observed = np.bincount(token_ids, minlength=len(probabilities))
    expected = (probabilities / probabilities.sum()).numpy() * len(token_ids)
    assert not observed[expected == 0].any()
    is_possible = expected > 0
    return float((((observed - expected) ** 2)[is_possible] / expected[is_possible]).sum())


LIMIT = 20.5
"""Chi-square with 5 degrees of freedom exceeds it once in 1,000 times; the seeds are fixed."""
LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0], [0.0, 0.3, 1.5, 0.2, 0.1, -0.5], [0.0] * 6])
SETS = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 2.0}]


@pytest.mark.parametrize("params", SETS, ids=str)
@pytest.mark.parametrize("drafts", [[0, 2], [4, 2], [1, 1]])
def test_every_place_that_is_reached_is_distributed_as_the_model_says(
    drafts: list[int], params: dict[str, float]
) -> None:
    token_ids, num_kept, probabilities = draw_with_drafts(LOGITS, drafts, **params)
    for place in range(len(LOGITS)):
        reached = token_ids[num_kept > place, place]
        if len(reached) > 200:
            assert chi_square(reached, probabilities[place]) < LIMIT


@pytest.mark.parametrize("draft", [0, 2, 5])
def test_a_draft_is_accepted_as_often_as_it_is_likely_and_else_replaced_by_the_rest(draft: int) -> None:
    token_ids, num_kept, probabilities = draw_with_drafts(LOGITS[:2], [draft])
    likelihood = float(probabilities[0, draft])
    deviation = (likelihood * (1 - likelihood) / NUM_DRAWS) ** 0.5
    assert abs((num_kept == 2).mean() - likelihood) < 3.5 * deviation
    rest = probabilities[0].clone()
    rest[draft] = 0.0
    assert chi_square(token_ids[num_kept == 1, 0], rest) < LIMIT


def test_the_token_after_an_accepted_draft_does_not_depend_on_the_draw_that_accepted_it() -> None:
    """Pairs of tokens are distributed as the product of their places' probabilities, given the first is the draft."""
    draft = 0
    token_ids, num_kept, probabilities = draw_with_drafts(LOGITS[:2], [draft])
    pairs = token_ids[num_kept == 2]
    assert set(pairs[:, 0].tolist()) == {draft}
    assert chi_square(pairs[:, 1], probabilities[1]) < LIMIT


def test_a_seeded_row_draws_the_same_tokens_with_and_without_drafts() -> None:
    with_drafts, num_kept, _ = draw_with_drafts(LOGITS, [0, 2])
    without, _, _ = draw_with_drafts(LOGITS, [3, 3])
    for place in range(len(LOGITS)):
        assert (with_drafts[num_kept > place, place] == without[num_kept > place, place]).all()


def test_a_likely_draft_is_mostly_accepted() -> None:
    _, num_kept, _ = draw_with_drafts(torch.tensor([[8.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2), [0])
    assert (num_kept == 2).mean() > 0.99
