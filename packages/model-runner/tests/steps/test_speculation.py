"""Drafts in a real runner do not change a request's output."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.input_batch import InputBatchError
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 64
NUM_TOKENS = 14
VOCAB_SIZE = 97
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [50, 40, 30, 20, 10] * 4, "d": [96]}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "top-p": SamplingParams(temperature=1.3, seed=7, top_p=0.9, min_p=0.01),
    "top-k": SamplingParams(temperature=0.7, seed=8, top_k=9),
    "penalties": SamplingParams(
        temperature=1.0, seed=9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 4.0, 5: -4.0}, repetition_penalty=1.5),
    "min-tokens": SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(0, 97, 2))),
    "bad-words": SamplingParams(temperature=1.0, seed=3, bad_words_token_ids=tuple((t, t + 1) for t in range(90))),
    "no-repeat": SamplingParams(temperature=0.0, no_repeat_ngram_size=2),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"))
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=128, block_size=4, device="cpu"))
    runner.load_model()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second one
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.fixture
def runner(loaded: ModelRunner) -> Iterator[ModelRunner]:
    """The shared runner, with new KV storage where a test leaves requests behind."""
    yield loaded
    loaded.initialize_kv_cache(NUM_BLOCKS)


@pytest.fixture(scope="module")
def answers(loaded: ModelRunner) -> dict[str, dict[str, list[int]]]:
    """Output of each prompt without drafts, by kind of sampling."""
    found = {}
    for kind, params in KINDS.items():
        driver = StepDriver(loaded, NUM_BLOCKS)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt, params)
        found[kind] = {name: list(output) for name, output in driver.run(NUM_TOKENS).items()}
        end(driver)
    return found


def end(driver: StepDriver) -> None:
    for name in PROMPTS:
        driver.remove(name)
    driver.step({})


def guess(schedule: random.Random, right: list[int]) -> list[int]:
    """Some right tokens, then others; none in some steps."""
    num_right = schedule.randint(0, 4)
    return right[:num_right] + [schedule.randrange(VOCAB_SIZE) for _ in range(schedule.randint(0, 3))]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_guesses_give_the_tokens_of_no_guesses(
    loaded: ModelRunner, answers: dict[str, dict[str, list[int]]], kind: str, seed: int
) -> None:
    """Right and wrong drafts, mixed with chunks of prefills and with preemptions."""
    schedule, expected = random.Random(seed), answers[kind]
    driver = StepDriver(loaded, NUM_BLOCKS)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, KINDS[kind])
    while unfinished := [name for name in PROMPTS if len(driver.outputs[name]) < NUM_TOKENS]:
        chosen = schedule.sample(unfinished, schedule.randint(1, len(unfinished)))
        nums = {name: schedule.randint(1, driver.num_left(name)) for name in chosen}
        drafts = {
            name: guess(schedule, expected[name][len(driver.outputs[name]) :])
            for name, num in nums.items()
            if num == driver.num_left(name)
        }
        driver.step(nums, drafts)
        if schedule.random() < 0.2:
            driver.preempt(schedule.choice(chosen))
    end(driver)
    assert {name: output[:NUM_TOKENS] for name, output in driver.outputs.items()} == expected


def test_outputs_of_the_kinds_of_sampling_differ(answers: dict[str, dict[str, list[int]]]) -> None:
    """Otherwise their drafts would prove little."""
    texts = {str(answer) for answer in answers.values()}
    assert len(texts) == len(KINDS)


@pytest.mark.parametrize("num_right", range(5))
def test_as_many_tokens_come_as_were_right_and_one(
    runner: ModelRunner, answers: dict[str, dict[str, list[int]]], num_right: int
) -> None:
    right = answers["greedy"]["a"]
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", PROMPTS["a"], KINDS["greedy"])
    drafts = right[:num_right] + [(token_id + 1) % VOCAB_SIZE for token_id in right[num_right:4]]
    output = driver.step({"a": 7}, {"a": drafts})
    assert output.sampled_token_ids == [right[: num_right + 1]]


def test_logprobs_of_accepted_tokens_are_those_of_single_steps(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=1, logprobs=3)
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("plain", PROMPTS["a"], params)
    driver.add("silent", PROMPTS["b"], KINDS["greedy"])
    entries = []
    for num in (7, 1, 1, 1):
        entries += driver.step({"silent": driver.num_left("silent"), "plain": num}).logprobs["plain"]
    right = driver.outputs["plain"]
    driver.add("guessed", PROMPTS["a"], params)
    drafts = {"guessed": [*right[:2], (right[2] + 1) % VOCAB_SIZE], "silent": [1, 2]}
    output = driver.step({"silent": 1, "guessed": 7}, drafts)
    assert driver.outputs["guessed"] == right[:3]
    assert list(output.logprobs) == ["guessed"]
    for found, expected in zip(output.logprobs["guessed"], entries[:3], strict=True):
        assert found.token_ids == expected.token_ids
        assert found.rank == expected.rank
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "drafts", "text"),
    [(7, [97], "outside"), (7, [-1], "outside"), (6, [1], "6 tokens|7 tokens"), (7, [1] * 122, "beyond 128 tokens")],
)
def test_drafts_that_cannot_be_are_refused(runner: ModelRunner, num_tokens: int, drafts: list[int], text: str) -> None:
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", PROMPTS["a"], KINDS["greedy"])
    with pytest.raises(InputBatchError, match=text):
        driver.step({"a": num_tokens}, {"a": drafts})
