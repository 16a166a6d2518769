"""The device's sampler chooses the tokens of the host's sampler, from state on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.sampling import Sampler, TokenBitmask
from llmstack_model_runner.steps.gpu.sampling_rows import DeviceSample, DeviceSamplingRows, SamplingVariant
from llmstack_types import SamplingParams, StructuredOutputsParams

VOCAB_SIZE = 600
CPU = torch.device("cpu")

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 300, 599, 600, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.one_of(st.none(), st.integers(-(1 << 70), 1 << 70)),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([None, (7, 10_000)]),
)


def random_logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def make_device_rows(
    params: Sequence[SamplingParams], tokens: Sequence[Sequence[int]], num_prompt_tokens: int = 1
) -> DeviceSamplingRows:
    rows = DeviceSamplingRows(len(params), VOCAB_SIZE, CPU)
    for row, (one, known) in enumerate(zip(params, tokens, strict=True)):
        rows.set_row(row, one, np.array(known, dtype=np.int64), num_prompt_tokens, (3,))
    rows.flush()
    return rows


def sample(rows: DeviceSamplingRows, logits: torch.Tensor, chosen: Sequence[int] | None = None) -> DeviceSample:
    chosen = range(len(logits)) if chosen is None else chosen
    variant = rows.variant(np.array(chosen))
    return rows.sample(logits, torch.tensor(chosen, dtype=torch.int32), variant)


def sample_on_host(
    logits: torch.Tensor, params: Sequence[SamplingParams], tokens: Sequence[Sequence[int]], num_prompt_tokens: int = 1
) -> list[int]:
    rows = make_sampling_rows(params, tokens, VOCAB_SIZE, num_prompt_tokens=num_prompt_tokens, eos_token_ids=(3,))
    indices = np.array([len(known) - num_prompt_tokens for known in tokens])
    token_ids: list[int] = (
        Sampler().sample(logits.clone(), rows.metadata(np.arange(len(params)), indices)).token_ids.tolist()
    )
    return token_ids


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 1000))
def test_the_device_chooses_what_the_host_chooses_step_after_step(params: list[SamplingParams], seed: int) -> None:
    tokens = [[5, 9, 5, row % 4, 7] for row in range(len(params))]  # a prompt of 2, and 3 generated before
    rows = make_device_rows(params, tokens, num_prompt_tokens=2)
    for step in range(3):
        logits = random_logits(len(params), seed + step)
        expected = sample_on_host(logits, params, tokens, num_prompt_tokens=2)
        assert sample(rows, logits).token_ids.tolist() == expected
        tokens = [[*known, token_id] for known, token_id in zip(tokens, expected, strict=True)]


@settings(max_examples=20, deadline=None)
@given(PARAMS, st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 1000))
def test_a_row_draws_the_same_alone_and_among_any_neighbours(
    one: SamplingParams, others: list[SamplingParams], seed: int
) -> None:
    logits = random_logits(len(others) + 1, seed)
    alone = sample(make_device_rows([one], [[1, 2]]), logits[-1:])
    together = sample(make_device_rows([*others, one], [[1, 2]] * (len(others) + 1)), logits)
    assert int(together.token_ids[-1]) == int(alone.token_ids[0])


def test_a_row_may_be_left_out_of_steps_and_stand_anywhere_in_a_batch() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, frequency_penalty=0.5) for seed in range(3)]
    rows = make_device_rows(params, [[1]] * 3)
    logits = random_logits(3)
    first = sample(rows, logits).token_ids.tolist()
    second = sample(rows, logits[[2, 0]], [2, 0]).token_ids.tolist()
    expected = sample_on_host(logits, params, [[1, token_id] for token_id in first])
    assert second == [expected[2], expected[0]]


def test_a_request_that_comes_again_with_its_output_goes_on_where_it_was() -> None:
    params = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.3)
    rows = make_device_rows([params], [[4, 4]])
    tokens = [4, 4]
    for step in range(6):
        if step == 3:  # preempted, and back after another one had its row
            rows.clear_row(0)
            rows.set_row(0, SamplingParams(temperature=0.5, repetition_penalty=2.0), np.arange(50), 10)
            rows.flush()
            rows.clear_row(0)
            rows.set_row(0, params, np.array(tokens, dtype=np.int64), 1, (3,))
            rows.flush()
        expected = sample_on_host(random_logits(1, step), [params], [tokens])
        assert sample(rows, random_logits(1, step)).token_ids.tolist() == expected
        tokens += expected


def test_the_scratch_row_pads_batches_and_changes_no_other_row() -> None:
    params = [SamplingParams(temperature=1.0, seed=1, frequency_penalty=1.0), SamplingParams(temperature=0.0)]
    rows = make_device_rows(params, [[1], [1]])
    padded = [0, rows.scratch_row, 1, rows.scratch_row]
    for step in range(3):
        found = sample(rows, random_logits(4, step), padded)
        assert found.is_good.all()
        assert int(found.token_ids[1]) == int(random_logits(4, step)[1].argmax())


def test_the_variant_is_what_the_rows_ask_for_together() -> None:
    greedy, random = SamplingParams(temperature=0.0, top_k=5), SamplingParams(temperature=1.0)
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    rows = make_device_rows([greedy, random, penalised], [[1]] * 3)
    assert rows.variant(np.array([0, rows.scratch_row])) is SamplingVariant.GREEDY
    assert rows.variant(np.array([0, 1])) is SamplingVariant.RANDOM
    assert rows.variant(np.array([1, 2])) is SamplingVariant.PENALTIES
    rows.clear_row(2)
    assert rows.variant(np.array([0, 2])) is SamplingVariant.GREEDY


@pytest.mark.parametrize("variant", list(SamplingVariant)[1:])
def test_a_greater_variant_chooses_the_same(variant: SamplingVariant) -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, repetition_penalty=1.5)]
    rows = make_device_rows(params, [[1]] * 2)
    logits = random_logits(1)
    found = rows.sample(logits, torch.zeros(1, dtype=torch.int32), variant)
    assert found.token_ids.tolist() == logits.argmax(dim=-1).tolist()


def test_token_counts_are_allocated_with_the_first_penalty(caplog: pytest.LogCaptureFixture) -> None:
    rows = DeviceSamplingRows(2, VOCAB_SIZE, CPU)
    with caplog.at_level(logging.INFO):
        rows.set_row(0, SamplingParams(), np.array([1]), 1)
        rows.flush()
        assert not caplog.records
        rows.set_row(1, SamplingParams(presence_penalty=0.1), np.array([1]), 1)
        rows.flush()
        rows.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"token counts for penalties use {rows.max_penalty_bytes / 1e6:.1f} MB of device memory"
    ]
    assert rows.max_penalty_bytes == 3 * VOCAB_SIZE * 4


def test_masks_are_those_of_the_host() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=3)]
    bits = torch.randint(-(1 << 31), 1 << 31, (2, -(-VOCAB_SIZE // 32)), dtype=torch.int64).int()
    bits[0] = -1
    logits = random_logits(2)
    metadata = make_sampling_rows(params, [[1], [1]], VOCAB_SIZE).metadata(
        np.arange(2), np.zeros(2, dtype=np.int64), TokenBitmask(np.arange(2), bits.numpy())
    )
    rows = make_device_rows(params, [[1], [1]])
    found = rows.sample(logits, torch.arange(2, dtype=torch.int32), SamplingVariant.RANDOM, bitmask=bits)
    assert found.token_ids.tolist() == Sampler().sample(logits.clone(), metadata).token_ids.tolist()


def test_a_failed_row_goes_on_with_token_0_as_on_the_host() -> None:
    params = [SamplingParams(temperature=1.0, seed=1, frequency_penalty=9.0)]
    rows = make_device_rows(params, [[1]])
    assert not sample(rows, torch.full((1, VOCAB_SIZE), torch.nan)).is_good
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :2] = torch.tensor([8.5, 8.0])
    expected = sample_on_host(logits, params, [[1, 0]])
    assert sample(rows, logits).token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), None),
        (SamplingParams(temperature=0.0, logprobs=3, presence_penalty=1.0, min_tokens=2), None),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=(1, 2)), "allowed_token_ids"),
        (SamplingParams(bad_words_token_ids=((1, 2),)), "bad_words"),
        (SamplingParams(no_repeat_ngram_size=3), "no_repeat_ngram_size"),
        (SamplingParams(typical_p=0.5), "typical_p"),
        (SamplingParams(top_n_sigma=1.0), "top_n_sigma"),
        (SamplingParams(logprobs=0, logprob_token_ids=(1,)), "logprob_token_ids"),
        (SamplingParams(thinking_token_budget=1), "thinking_token_budget"),
        (SamplingParams(min_tokens=1, stop_token_ids=tuple(range(20))), "ending tokens"),
        (SamplingParams(stop_token_ids=tuple(range(20))), None),
        (SamplingParams(temperature=0.0, use_beam_search=True, logprobs=3), None),
        (SamplingParams(temperature=0.0, use_beam_search=True, logprobs=3, min_tokens=1), "beams"),
        (SamplingParams(temperature=0.0, use_beam_search=True, logprobs=3, repetition_penalty=1.1), "beams"),
    ],
)
def test_what_the_device_cannot_do_is_refused(params: SamplingParams, text: str | None) -> None:
    refusal = DeviceSamplingRows.refusal(params, has_processors=False, eos_token_ids=(1,))
    assert refusal is None if text is None else text in str(refusal)
    assert "processors" in str(DeviceSamplingRows.refusal(params, has_processors=True))


def test_constrained_rows_end_where_their_masks_let_them() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=5, structured_outputs=StructuredOutputsParams(regex="a"))
    logits = random_logits(1)
    logits[0, 3] = 50.0
    assert sample(make_device_rows([params], [[1]]), logits).token_ids.tolist() == [3]
    plain = replace(params, structured_outputs=None)
    assert sample(make_device_rows([plain], [[1]]), logits).token_ids.tolist() != [3]
