"""A row that cannot be computed ends alone; the tokens of all other rows do not change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.device.errors import allocation, is_device_failure, is_out_of_memory
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.input_batch import InputBatchError
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint
from llmstack_types import (
    EngineStartError,
    ModelRunnerConfig,
    ModelRunnerOutput,
    NewRequest,
    QuarantinedError,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)

NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.2)
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [50, 40, 30, 20, 10] * 4, "d": [96]}
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Faults:
    """Stands before a model's forward pass and raises where `is_too_much` says so of a step's tokens.

    Attributes:
        num_calls: Of the forward pass, those that failed included.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.num_calls = 0
        self.error: Exception = NO_MEMORY
        self.is_too_much: Callable[[list[int]], bool] = lambda token_ids: False
        model = runner._model
        if model is None:
            raise AssertionError("load the model first")
        self._forward = model.forward
        model.forward = self.forward  # type: ignore[method-assign, assignment]  # the fault

    def forward(self, token_ids: torch.Tensor, *arguments: object) -> torch.Tensor:
        self.num_calls += 1
        if self.is_too_much(token_ids.tolist()):
            raise self.error
        return self._forward(token_ids, *arguments)  # type: ignore[arg-type]  # passed through


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Faults]:
    folder = write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"))
    config = ModelRunnerConfig(str(folder), max_model_len=128, block_size=4, device="cpu", enforce_eager=True)
    runner = ModelRunner(config)
    runner.load_model()
    torch.set_num_threads(1)
    return runner, Faults(runner)


@pytest.fixture
def faulty(loaded: tuple[ModelRunner, Faults]) -> Iterator[tuple[StepDriver, Faults]]:
    runner, faults = loaded
    faults.is_too_much = lambda token_ids: False
    runner.initialize_kv_cache(NUM_BLOCKS)
    faults.num_calls = 0
    yield StepDriver(runner, NUM_BLOCKS), faults
    faults.is_too_much, faults.error = (lambda token_ids: False), NO_MEMORY


def expected_outputs(driver: StepDriver, params: SamplingParams, num_tokens: int) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, params)
    outputs = {name: list(tokens) for name, tokens in driver.run(num_tokens).items()}
    for name in PROMPTS:
        driver.remove(name)
    driver.step({})
    return outputs


def step_all(driver: StepDriver, names: list[str]) -> ModelRunnerOutput:
    return driver.step({name: driver.num_left(name) for name in names})


def test_a_step_that_finds_no_memory_once_is_computed_again(faulty: tuple[StepDriver, Faults]) -> None:
    driver, faults = faulty
    expected = expected_outputs(driver, RANDOM, 3)
    failures = iter([True])
    faults.is_too_much = lambda token_ids: next(failures, False)
    faults.num_calls = 0
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, RANDOM)
    assert driver.run(3) == expected
    assert driver.errors == {}
    assert faults.num_calls == 4


def test_a_step_that_is_too_large_is_computed_in_halves(faulty: tuple[StepDriver, Faults]) -> None:
    driver, faults = faulty
    expected = expected_outputs(driver, RANDOM, 2)
    faults.is_too_much = lambda token_ids: len(token_ids) > 20
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, RANDOM)
    assert driver.run(2) == expected
    assert driver.errors == {}


@settings(max_examples=6, deadline=None)
@given(bad=st.sets(st.sampled_from(sorted(PROMPTS))), order=st.permutations(sorted(PROMPTS)), is_greedy=st.booleans())
def test_rows_that_fail_alone_end_and_all_others_go_on(
    loaded: tuple[ModelRunner, Faults], bad: set[str], order: list[str], is_greedy: bool
) -> None:
    runner, faults = loaded
    faults.is_too_much = lambda token_ids: False
    runner.initialize_kv_cache(NUM_BLOCKS)
    driver, params = StepDriver(runner, NUM_BLOCKS), GREEDY if is_greedy else RANDOM
    expected = expected_outputs(driver, params, 3)
    last_tokens = {PROMPTS[name][-1] for name in bad}
    faults.is_too_much = lambda token_ids: bool(last_tokens & set(token_ids))
    for name in order:
        driver.add(name, PROMPTS[name], params)
    output = step_all(driver, order)
    assert output.request_ids == order
    assert output.errors == dict.fromkeys([name for name in order if name in bad], QuarantinedError.OUT_OF_MEMORY)
    faults.is_too_much = lambda token_ids: False
    for name in bad:
        driver.remove(name)
    good = [name for name in order if name not in bad]
    for _ in range(2):
        step_all(driver, good)
    assert {name: driver.outputs[name] for name in good} == {name: expected[name] for name in good}
    assert all(driver.outputs[name] == [] for name in bad)


def test_the_number_of_tries_is_bounded(faulty: tuple[StepDriver, Faults]) -> None:
    driver, faults = faulty
    faults.is_too_much = lambda token_ids: True
    for index in range(16):
        driver.add(str(index), [index + 1], GREEDY)
    output = step_all(driver, [str(index) for index in range(16)])
    assert len(output.errors) == 16
    assert faults.num_calls == 1 + 31  # once more as a whole, then each node of the tree of halves


def test_any_error_of_a_row_ends_that_row_and_is_logged(
    faulty: tuple[StepDriver, Faults], caplog: pytest.LogCaptureFixture
) -> None:
    driver, faults = faulty
    faults.error = IndexError("index 7 is out of bounds")
    faults.is_too_much = lambda token_ids: 8 in token_ids
    for name in ("a", "b", "d"):
        driver.add(name, PROMPTS[name], GREEDY)
    output = step_all(driver, ["a", "b", "d"])
    assert output.errors == {"b": QuarantinedError.NOT_COMPUTABLE}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 0, 1]
    assert "index 7 is out of bounds" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        InputBatchError("the scheduler says something else"),
        KeyboardInterrupt(),
    ],
)
def test_errors_after_which_no_step_can_be_correct_end_the_engine(
    faulty: tuple[StepDriver, Faults], error: Exception
) -> None:
    driver, faults = faulty
    faults.error, faults.is_too_much = error, lambda token_ids: True
    driver.add("a", [1], GREEDY)
    with pytest.raises(type(error)):
        step_all(driver, ["a"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NO_MEMORY, True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_a_failed_allocation_is_distinguished_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert not (expected and is_device_failure(error))


def test_a_failed_allocation_at_the_start_is_one_sentence_with_what_to_do() -> None:
    with pytest.raises(EngineStartError, match=r"^out of memory: a table of 5 bytes; lower --x$"), \
            allocation("a table of 5 bytes", "lower --x"):  # fmt: skip
        raise NO_MEMORY
    with pytest.raises(IndexError), allocation("a table", "lower --x"):
        raise IndexError


def test_a_row_that_shares_what_a_failed_row_was_to_write_fails_too(faulty: tuple[StepDriver, Faults]) -> None:
    driver, faults = faulty
    prompt = list(range(1, 13))
    faults.is_too_much = lambda token_ids: 12 in token_ids
    driver.add("first", prompt, GREEDY)
    driver.add("other", [60, 61], GREEDY)
    driver.add("reader", [*prompt[:8], 70, 71], GREEDY)
    assert list(driver.step({"first": 12, "other": 2}).errors) == ["first"]
    assert driver.share("reader", "first") == 8
    output = driver.step({"reader": 2, "other": 1})
    assert output.errors == {"reader": QuarantinedError.NOT_COMPUTABLE}
    assert len(output.sampled_token_ids[1]) == 1
    faults.is_too_much = lambda token_ids: False
    for name in ("first", "reader"):
        driver.remove(name)
    driver.add("again", prompt, GREEDY)  # its blocks are those of the failed ones
    assert step_all(driver, ["again", "other"]).errors == {}


def test_a_row_fails_with_the_row_of_the_same_step_whose_blocks_it_shares(
    loaded: tuple[ModelRunner, Faults], faulty: tuple[StepDriver, Faults]
) -> None:
    runner, faults = loaded[0], faulty[1]
    faults.is_too_much = lambda token_ids: 12 in token_ids
    prompts = {"first": list(range(1, 13)), "reader": [*range(1, 9), 70, 71], "other": [60]}
    rows = [
        ScheduledRequest("first", 0, 12, [0, 1, 2]),
        ScheduledRequest("reader", 8, 2, [0, 1, 3]),
        ScheduledRequest("other", 0, 1, [4]),
    ]
    new = [NewRequest(name, token_ids, len(token_ids), GREEDY) for name, token_ids in prompts.items()]
    output = runner.execute_model(SchedulerOutput(1, new, rows, [], 15)).result()
    assert output.errors == {"first": QuarantinedError.OUT_OF_MEMORY, "reader": QuarantinedError.NOT_COMPUTABLE}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 0, 1]
    copied = SchedulerOutput(2, scheduled_requests=[ScheduledRequest("other", 1, 1, [])], block_copies=[(1, 4)])
    assert list(runner.execute_model(copied).result().errors) == ["other"]  # a copy of what was never written


def test_a_row_scheduled_ahead_of_its_failure_is_dropped_without_being_computed(
    faulty: tuple[StepDriver, Faults],
) -> None:
    driver, faults = faulty
    faults.is_too_much = lambda token_ids: True
    driver.add("a", [1, 2, 3], GREEDY)
    assert list(step_all(driver, ["a"]).errors) == ["a"]
    faults.is_too_much = lambda token_ids: False
    faults.num_calls = 0
    driver.outputs["a"].append(0)  # the scheduler believes in a token that it does not know yet
    assert list(step_all(driver, ["a"]).errors) == ["a"]
    assert faults.num_calls == 0


def test_masks_are_fetched_once_and_applied_to_their_rows(loaded: tuple[ModelRunner, Faults]) -> None:
    runner, faults = loaded
    faults.is_too_much = lambda token_ids: False
    runner.initialize_kv_cache(NUM_BLOCKS)
    driver = StepDriver(runner, NUM_BLOCKS)
    for name in ("a", "b", "d"):
        driver.add(name, PROMPTS[name], GREEDY)
    num_calls = itertools.count()
    num_words = -(-97 // 32)

    def mask(token_id: int) -> bytes:
        bits = bytearray(4 * num_words)
        bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)

    def masks() -> TokenMasks:
        next(num_calls)
        return TokenMasks(["a", "d"], bytearray(mask(11) + mask(22)))

    execute_model = runner.execute_model
    faults.is_too_much = lambda token_ids: len(token_ids) > 7

    def execute(scheduled: SchedulerOutput) -> object:
        return execute_model(scheduled, masks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", execute)
        output = step_all(driver, ["a", "b", "d"])
    assert (output.sampled_token_ids[0], output.sampled_token_ids[2]) == ([11], [22])
    assert next(num_calls) == 1


def test_a_start_without_memory_for_the_first_step_names_the_flags_to_lower(tmp_path: Path) -> None:
    runner = ModelRunner(ModelRunnerConfig(str(write_gpt2_checkpoint(tmp_path)), max_model_len=64, device="cpu"))
    runner.load_model()
    Faults(runner).is_too_much = lambda token_ids: True
    with pytest.raises(EngineStartError, match=r"too little memory.*--gpu-memory-utilization"):
        runner.initialize_kv_cache(8)


def test_unwritten_blocks_are_tracked_to_the_host_and_back_for_a_few_steps(
    loaded: tuple[ModelRunner, Faults],
) -> None:
    runner, faults = loaded
    faults.is_too_much = lambda token_ids: False
    runner.initialize_kv_cache(NUM_BLOCKS, 4)
    faults.is_too_much = lambda token_ids: 12 in token_ids
    new = [NewRequest("a", [12, 1], 2, GREEDY), NewRequest("b", [5] * 9, 9, GREEDY)]
    rows = [ScheduledRequest("a", 0, 2, [0]), ScheduledRequest("b", 0, 9, [1, 2, 3])]
    assert list(runner.execute_model(SchedulerOutput(1, new, rows, [], 11)).result().errors) == ["a"]
    runner.execute_model(SchedulerOutput(2, removed_request_ids=["a"], swap_outs=[(0, 3)])).result()
    row = ScheduledRequest("b", 9, 1, [])
    spoiled = SchedulerOutput(3, scheduled_requests=[row], total_num_scheduled_tokens=1, swap_ins=[(3, 2)])
    assert list(runner.execute_model(spoiled).result().errors) == ["b"]
    for number in range(4, 9):
        runner.execute_model(SchedulerOutput(number)).result()
    unwritten = runner._recovery.unwritten
    assert not unwritten.on_device
    assert not unwritten._host
