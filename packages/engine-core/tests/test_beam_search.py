"""The bookkeeping of a beam search, over a model that is a function of the text."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.beams import BeamSearch
from llmstack_types import EngineCoreRequest, FinishReason, SamplingParams, TokenLogprobs
from llmstack_types.engine_core import MIN_LOGPROB

EOS = 0


def distribution(seed: int, token_ids: tuple[int, ...], vocab_size: int) -> list[float]:
    rng = random.Random(f"{seed} {token_ids}")
    weights = [rng.random() ** 3 + 1e-3 for _ in range(vocab_size)]
    return [math.log(weight / sum(weights)) for weight in weights]


def choices(seed: int, token_ids: tuple[int, ...], vocab_size: int, num_choices: int) -> TokenLogprobs:
    logprobs = distribution(seed, token_ids, vocab_size)
    best = sorted(range(vocab_size), key=lambda token_id: -logprobs[token_id])[:num_choices]
    # The first token is what the row sampled: a search must not look at it.
    return TokenLogprobs((vocab_size, *best), (math.nan, *(logprobs[token_id] for token_id in best)), 1)


def make(width: int, max_tokens: int = 5, eos_token_ids: tuple[int, ...] = (EOS,), **params: Any) -> BeamSearch:
    sampling_params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, **params)
    return BeamSearch(EngineCoreRequest("r", [1], sampling_params, eos_token_ids))


def advance(search: BeamSearch, seed: int, vocab_size: int) -> None:
    search.advance([choices(seed, beam.token_ids, vocab_size, search.num_choices) for beam in search.running])


def run(search: BeamSearch, seed: int = 0, vocab_size: int = 7) -> BeamSearch:
    while not search.is_over:
        advance(search, seed, vocab_size)
    return search


def sequences(search: BeamSearch) -> list[tuple[int, ...]]:
    return [complete.beam.token_ids for complete in search.complete]


EARLY_STOPPING = st.sampled_from([True, False, "never"])
PENALTIES = st.sampled_from([-0.5, 0.0, 1.0, 2.0])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), PENALTIES, EARLY_STOPPING)
def test_what_a_search_returns_is_scored_ordered_distinct_and_ended(
    seed: int, width: int, max_tokens: int, length_penalty: float, early_stopping: bool | str
):
    params = {"length_penalty": length_penalty, "early_stopping": early_stopping, "stop_token_ids": [1]}
    search = run(make(width, max_tokens, **params), seed)
    assert len(set(sequences(search))) == len(search.complete) == width
    scores = [complete.score for complete in search.complete]
    assert scores == sorted(scores, reverse=True)
    for complete in search.complete:
        token_ids = complete.beam.token_ids
        prefixes = [token_ids[:length] for length in range(len(token_ids))]
        logprob = sum(distribution(seed, prefix, 7)[token_ids[len(prefix)]] for prefix in prefixes)
        assert complete.beam.logprob == pytest.approx(logprob)
        assert complete.score == pytest.approx(logprob / len(token_ids) ** length_penalty)
        assert not {EOS, 1}.intersection(token_ids[:-1])
        is_ended_by_token = token_ids[-1] in (EOS, 1)
        assert is_ended_by_token or len(token_ids) == max_tokens
        assert complete.finish_reason is (FinishReason.STOP if is_ended_by_token else FinishReason.LENGTH)
        assert complete.stop_reason == (1 if token_ids[-1] == 1 else None)


@given(st.integers(0, 10**6), PENALTIES)
def test_as_wide_as_the_tree_a_search_finds_the_best_of_all_sequences(seed: int, length_penalty: float):
    vocab_size, max_tokens = 3, 3
    every = [
        tokens
        for length in range(1, max_tokens + 1)
        for tokens in itertools.product(range(vocab_size), repeat=length)
        if EOS not in tokens[:-1] and (tokens[-1] == EOS or length == max_tokens)
    ]

    def score(tokens: tuple[int, ...]) -> float:
        prefixes = [tokens[:length] for length in range(len(tokens))]
        logprob = sum(distribution(seed, prefix, vocab_size)[tokens[len(prefix)]] for prefix in prefixes)
        return logprob / len(tokens) ** length_penalty

    search = run(make(len(every), max_tokens, length_penalty=length_penalty), seed, vocab_size)
    assert sequences(search) == sorted(every, key=score, reverse=True)


@given(st.integers(0, 10**6), st.integers(2, 4))
def test_stopping_early_ends_with_the_step_that_completes_enough(seed: int, width: int):
    search = make(width, 12, early_stopping=True)
    while not search.is_over:
        assert len(search.complete) < width
        advance(search, seed, 5)
    assert len(search.complete) == width


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_patient_search_finds_nothing_worse(seed: int, width: int):
    hasty = run(make(width, 8, early_stopping=True, length_penalty=0.0), seed, 5)
    patient = run(make(width, 8, early_stopping="never", length_penalty=0.0), seed, 5)
    assert patient.complete[0].score >= hasty.complete[0].score


def test_a_beam_knows_which_one_it_goes_on_from():
    search = make(3, 6)
    advance(search, 4, 7)
    before = search.running
    advance(search, 4, 7)
    for beam in search.running:
        assert before[beam.parent].token_ids == beam.token_ids[:-1]


def test_enough_choices_are_asked_for_that_every_beam_can_go_on_whatever_ends():
    search = make(2, 5, eos_token_ids=(0, 1, 2), stop_token_ids=[3])
    assert search.num_choices == 6
    likeliest_end = TokenLogprobs((9, 0, 1, 2, 3, 4, 5), (0.0, -1.0, -1.1, -1.2, -1.3, -4.0, -5.0), 1)
    search.advance([likeliest_end])
    assert [beam.token_ids for beam in search.running] == [(4,), (5,)]
    assert sequences(search) == [(0,), (1,)]


def test_the_end_of_sequence_is_a_token_like_others_where_it_is_to_be_ignored():
    search = run(make(2, 4, ignore_eos=True), 3, 4)
    assert {len(tokens) for tokens in sequences(search)} == {4}
    assert any(
        EOS in tokens[:-1] for seed in range(20) for tokens in sequences(run(make(2, 4, ignore_eos=True), seed, 4))
    )


def test_logprobs_hold_the_token_its_rank_and_the_likeliest_beside_it():
    search = run(make(2, 3, logprobs=2), 5)
    for complete in search.complete:
        for length, entry in enumerate(complete.beam.logprobs):
            expected = distribution(5, complete.beam.token_ids[:length], 7)
            token_id = complete.beam.token_ids[length]
            assert entry.token_ids[0] == token_id
            assert entry.logprobs[0] == expected[token_id]
            assert entry.rank == 1 + sum(logprob > expected[token_id] for logprob in expected)
            assert list(entry.logprobs[1:]) == sorted(expected, reverse=True)[:2]
    assert run(make(2, 3), 5).complete[0].beam.logprobs == ()


def test_tokens_that_are_not_allowed_become_no_beam():
    search = make(3, max_tokens=2)
    search.advance([TokenLogprobs((5, 4, 2, 1), (-0.1, -0.1, -3.0, MIN_LOGPROB), 1)])
    assert [beam.token_ids for beam in search.running] == [(4,), (2,)]
    search.advance([TokenLogprobs((5, 4), (-0.1, -0.1), 1), TokenLogprobs((5, 6, 7), (-0.2, -0.2, MIN_LOGPROB), 1)])
    assert search.is_over
    assert sequences(search) == [(4, 4), (2, 6)]


def test_a_forced_end_is_the_last_token_of_a_beam_and_costs_nothing():
    plain, forced = (
        make(3, max_tokens=4, ignore_eos=True),
        make(3, max_tokens=4, ignore_eos=True, forced_eos_token_id=EOS),
    )
    shorter = run(make(3, max_tokens=3, ignore_eos=True))
    for search in (plain, forced):
        run(search)
    assert sequences(forced) == [(*tokens, EOS) for tokens in sequences(shorter)] != sequences(plain)
    assert [one.finish_reason for one in forced.complete] == [FinishReason.LENGTH] * 3
    assert [one.beam.logprob for one in forced.complete] == [one.beam.logprob for one in shorter.complete]


def test_a_forced_first_token_counts_in_the_length():
    search = run(make(2, max_tokens=3, ignore_eos=True, length_penalty=2.0, forced_bos_token_id=5))
    assert [one.score for one in search.complete] == [one.beam.logprob / 4**2 for one in search.complete]
