"""A runner with rows on a device gives the output of the one on the host, one step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers import device_runners
from model_runner_helpers.ahead_driver import AheadDriver, play
from model_runner_helpers.cpu_stand_in import CpuStandIn
from model_runner_helpers.device_runners import GREEDY, NUM_BLOCKS, needs_native_kernels
from model_runner_helpers.device_runners import start as start_runner

from llmstack_model_runner.device.runtime import DeviceRuntime
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.input_batch import InputBatchError
from llmstack_model_runner.testing import StepDriver, identity_of, write_random_adapter
from llmstack_types import NumericalError, SamplingParams, TokenMasks

MAX_NUM_SEQS = 6
VOCAB_SIZE = 97

pytestmark = needs_native_kernels
folder = device_runners.folder


def start(folder: Path, runtime: DeviceRuntime | None, **options: Any) -> ModelRunner:
    return start_runner(folder, runtime, **{"max_num_seqs": MAX_NUM_SEQS, **options})


@pytest.fixture(scope="module")
def host(folder: Path) -> ModelRunner:
    return start(folder, None)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ModelRunner:
    return start(folder, CpuStandIn())


@pytest.fixture
def device(loaded: ModelRunner) -> Iterator[ModelRunner]:
    """The shared runner, whose rows are removed again by what each test leaves."""
    yield loaded
    loaded.initialize_kv_cache(NUM_BLOCKS)


class Judge:
    """Compares requests with their output alone on the host."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._known: dict[str, tuple[list[int], list[object]]] = {}

    def check(self, driver: AheadDriver) -> None:
        for name, request in driver.requests.items():
            outputs, logprobs = self._alone(request.prompt, request.params)
            assert request.outputs == outputs[: len(request.outputs)], (name, request.params)
            assert len(request.logprobs) in (0, len(request.outputs))
            assert request.logprobs == logprobs[: len(request.logprobs)]
            assert not request.error

    def _alone(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[object]]:
        key = f"{prompt} {params}"
        if key not in self._known:
            self._known[key] = self._run(prompt, params)
        return self._known[key]

    def _run(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[object]]:
        driver = StepDriver(self._runner, NUM_BLOCKS)
        driver.add("alone", prompt, params)
        logprobs: list[object] = []
        for _ in range(24):
            output = driver.step({"alone": driver.num_left("alone")})
            logprobs += output.logprobs.get("alone", [])
        driver.remove("alone")
        driver.step({})
        return driver.outputs["alone"], logprobs


@pytest.fixture(scope="module")
def judge(host: ModelRunner) -> Judge:
    return Judge(host)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_output_of_each_request_alone(device: ModelRunner, judge: Judge, seed: int) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    play(seed, driver, MAX_NUM_SEQS)
    judge.check(driver)
    assert sum(len(request.outputs) for request in driver.requests.values()) > 20


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 204))
def test_any_schedule_gives_the_output_of_each_request_alone_in_many_plays(
    device: ModelRunner, judge: Judge, seed: int
) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    play(seed, driver, MAX_NUM_SEQS, num_steps=60)
    judge.check(driver)


@pytest.mark.parametrize("changes", [{"enforce_eager": True}, {"cuda_graph_sizes": (3,)}], ids=str)
def test_steps_without_graphs_give_the_same_output(folder: Path, judge: Judge, changes: dict[str, Any]) -> None:
    runner = start(folder, CpuStandIn(), **changes)
    driver = AheadDriver(runner, NUM_BLOCKS)
    play(7, driver, MAX_NUM_SEQS)
    judge.check(driver)


def test_rows_with_adapters_have_the_tokens_of_the_host_one_step_ahead(folder: Path, tmp_path: Path) -> None:
    """Captured steps without adapters follow eager ones with them, and must not use the order of their rows."""
    paths = [
        write_random_adapter(tmp_path / "a", folder, ["c_attn", "c_fc"], seed=1),
        write_random_adapter(tmp_path / "b", folder, ["c_proj"], seed=2, rank=3),
    ]
    identities = [identity_of(path, path.name) for path in paths]
    runners = []
    for runtime in (None, CpuStandIn()):
        runner = start(folder, runtime, enable_lora=True, max_loras=2, max_lora_rank=8)
        for identity, path in zip(identities, paths, strict=True):
            runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        runners.append(runner)
    expected = StepDriver(runners[0], NUM_BLOCKS)
    driver = AheadDriver(runners[1], NUM_BLOCKS)
    names = [None, identities[0], identities[1], identities[0]]
    for number, name in enumerate(names):
        prompt = [number + 1, *range(5, 12)]
        expected.add(f"{number}", prompt, GREEDY, lora_name=name)
        driver.add(f"{number}", prompt, GREEDY, name)
    expected.run(12)
    driver.step({"0": 8, "1": 5})
    driver.step({"0": 1, "1": 3, "2": 8})
    decodes(driver, ["0", "1", "2", "3"], 4)
    driver.take_row("1")
    decodes(driver, ["0"], 3)
    decodes(driver, ["0", "2", "3"], 3)
    driver.land()
    for name, request in driver.requests.items():
        assert len(request.outputs) >= 4
        assert request.outputs == expected.outputs[name][: len(request.outputs)]
    assert len({tuple(outputs) for outputs in expected.outputs.values()}) == len(names)


def test_captured_steps_take_whatever_adapters_their_rows_have(folder: Path, tmp_path: Path) -> None:
    paths = [
        write_random_adapter(tmp_path / name, folder, ["wte", "c_attn", "c_proj"], seed=seed)
        for seed, name in enumerate("abc")
    ]
    identities = [identity_of(path, path.name) for path in paths]
    outputs = []
    for is_eager in (True, False):
        runner = start(folder, CpuStandIn(), enable_lora=True, max_loras=2, max_lora_rank=8, enforce_eager=is_eager)
        steps: Any = runner._steps
        for identity, path in zip(identities, paths, strict=True):
            runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        driver = AheadDriver(runner, NUM_BLOCKS)
        for number, identity in enumerate([identities[0], None, identities[1], identities[2], identities[0]]):
            params = SamplingParams(temperature=float(number == 4), seed=1, presence_penalty=number % 2)
            driver.add(f"{number}", [number + 1, *range(5, 12)], params, identity)
        driver.step({"0": 8, "1": 8, "2": 8})
        driver.step({"3": 8, "4": 8, "1": 1})  # in the slot of the second adapter
        num_eager, run_eagerly = 0, steps._run_eagerly

        def count(*arguments: Any, run: Any = run_eagerly) -> Any:
            nonlocal num_eager
            num_eager += 1
            return run(*arguments)

        steps._run_eagerly = count
        for names in (["0", "1", "2"], ["2", "0"], ["3", "1", "0", "4"], ["1"], ["4", "3"], ["2", "1", "0", "4"]):
            decodes(driver, names, 2)
        assert num_eager == (12 if is_eager else 0)
        driver.land()
        outputs.append({name: request.outputs for name, request in driver.requests.items()})
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0].values()}) == 5


def decodes(driver: AheadDriver, names: list[str], num_steps: int) -> None:
    for _ in range(num_steps):
        driver.step({name: driver.requests[name].num_left for name in names})


def test_a_steady_decode_sends_no_more_than_new_block_ids(
    device: ModelRunner, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    for index in range(3):
        driver.add(f"{index}", [index + 1] * 4, GREEDY)
    decodes(driver, ["0", "1", "2"], 2)
    sent: list[list[int]] = []
    staging: Any = device._steps._staging  # type: ignore[union-attr]  # what is sent is the point
    send = staging.send

    def note_and_send(arrays: list[Any]) -> Any:
        sent.append([len(array) for array in arrays])
        return send(arrays)

    monkeypatch.setattr(staging, "send", note_and_send)
    decodes(driver, ["0", "1", "2"], 8)
    driver.land()
    assert sent == [[3], [3]]  # two of eight steps begin a block, of each row
    judge.check(driver)


def test_results_come_a_step_later_without_the_host_having_waited(device: ModelRunner) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], GREEDY)
    waits: list[float] = []
    for _ in range(5):
        device.timing.reset()
        driver.step({"a": driver.requests["a"].num_left})
        waits.append(device.timing.phases_s["wait"])
        assert driver.requests["a"].num_under_way == 1
    assert waits[0] == 0.0  # nothing to read yet


def test_drafts_that_were_not_announced_are_refused(device: ModelRunner) -> None:
    driver = StepDriver(device, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], GREEDY)
    driver.step({"a": 3})
    with pytest.raises(InputBatchError, match="max_num_drafts is 0"):
        driver.step({"a": 1}, {"a": [5]})


def test_drafts_are_verified_before_anything_follows(folder: Path, host: ModelRunner) -> None:
    outputs = []
    for runner in (host, start(folder, CpuStandIn(), max_num_drafts=2)):
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("a", [1, 2, 3], SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5))
        driver.add("b", [4, 5], GREEDY)
        driver.step({"a": 3, "b": 2})
        first = driver.step({"a": 1, "b": 1}).sampled_token_ids
        for draft in (first[0][0], 17, 20):
            driver.step({"a": 1, "b": 1}, {"a": [draft, 30]})
            driver.step({"a": driver.num_left("a"), "b": 1})
        outputs.append(driver.outputs)
        for name in ("a", "b"):
            driver.remove(name)
        driver.step({})
    assert outputs[0] == outputs[1]


def test_the_host_samples_from_all_tokens_that_came_before(device: ModelRunner, judge: Judge) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    # 6 is the best token by far, and masked after itself.
    driver.add("a", [1, 2, 3], SamplingParams(temperature=0.0, logit_bias={6: 1e3}, bad_words_token_ids=((6, 6),)))
    decodes(driver, ["a"], 12)
    driver.land()
    assert driver.requests["a"].outputs.count(6) == 6
    judge.check(driver)


def test_the_sampler_depends_on_the_request_alone(
    device: ModelRunner, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    driver.add("host", [1, 2, 3], SamplingParams(temperature=1.0, seed=1, typical_p=0.9, logprobs=3))
    driver.add("device", [4, 5, 6], SamplingParams(temperature=1.0, seed=2, logprobs=1))
    sizes: list[int] = []
    sampler: Any = device._steps._device_sampler  # type: ignore[union-attr]  # who samples is the point
    sample = sampler.sample

    def note_and_sample(logits: torch.Tensor, *arguments: Any) -> Any:
        sizes.append(len(logits))
        return sample(logits, *arguments)

    monkeypatch.setattr(sampler, "sample", note_and_sample)
    decodes(driver, ["device", "host"], 6)
    driver.land()
    assert sizes == [1] * 6
    judge.check(driver)
    assert all(len(request.logprobs) == 6 for request in driver.requests.values())


@pytest.mark.parametrize("changes", [{}, {"typical_p": 0.9}], ids=["by the device", "by the host"])
def test_masks_are_fetched_once_and_applied(device: ModelRunner, judge: Judge, changes: dict[str, Any]) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    driver.add("free", [1, 2, 3], GREEDY)
    driver.add("bound", [1, 2, 3], SamplingParams(temperature=1.0, seed=1, **changes))
    num_calls = 0

    def masks() -> TokenMasks:
        nonlocal num_calls
        num_calls += 1
        bits = bytearray(4 * -(-VOCAB_SIZE // 32))
        bits[11 // 8] |= 1 << 11 % 8
        return TokenMasks(["bound"], bits)

    execute = device.execute_model
    driver._runner = type("Masked", (), {"execute_model": staticmethod(lambda step: execute(step, masks))})()
    decodes(driver, ["free", "bound"], 4)
    driver.land()
    assert driver.requests.pop("bound").outputs == [11] * 4
    assert num_calls == 4
    judge.check(driver)


def test_a_row_whose_logits_are_no_numbers_ends_alone(folder: Path, judge: Judge) -> None:
    runner = start(folder, CpuStandIn())
    model: Any = runner._model
    with torch.inference_mode():
        model._positions.weight[30] = torch.nan
    driver = AheadDriver(runner, NUM_BLOCKS)
    driver.add("bad", [1] * 29, GREEDY)
    driver.add("good", [3, 4, 5], GREEDY)
    decodes(driver, ["good", "bad"], 4)  # the fourth was started before the third was known to have failed
    driver.take_row("bad")
    decodes(driver, ["good"], 3)
    driver.land()
    bad = driver.requests.pop("bad")
    assert bad.error == NumericalError.TEXT
    assert len(bad.outputs) == 2  # positions 28 and 29
    judge.check(driver)


def test_prompts_with_logprobs_and_pooling_rows_are_what_they_are_on_the_host(
    device: ModelRunner, host: ModelRunner
) -> None:
    found = []
    for runner in (host, device):
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1))
        driver.add("b", [7, 8], GREEDY)
        outputs = [driver.step({"a": 3, "b": 2}), driver.step({"a": 2, "b": 1}), driver.step({"a": 1, "b": 1})]
        found.append([(one.sampled_token_ids, one.logprobs, one.prompt_logprobs) for one in outputs])
        for name in ("a", "b"):
            driver.remove(name)
        driver.step({})
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["send", "fetch"])
def test_a_step_that_fails_half_way_is_computed_again_from_what_the_host_knows(
    device: ModelRunner, judge: Judge, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=1.0, seed=4, presence_penalty=0.3))
    driver.add("b", [4, 5, 6], GREEDY)  # both need their next block in one step
    decodes(driver, ["a", "b"], 3)
    steps: Any = device._steps
    with torch.inference_mode():
        steps._rows.states[0][:2, 4:] = 0  # a block id that is not sent is that of both
    runtime = steps._runtime
    go_on, failures = getattr(runtime, place), iter([True])

    def fail_once(*arguments: object) -> object:
        if next(failures, False):  # the rows are marked as updated, or the device has advanced them
            raise torch.OutOfMemoryError("CUDA out of memory")
        return go_on(*arguments)

    monkeypatch.setattr(runtime, place, fail_once)
    decodes(driver, ["a", "b"], 16)
    driver.land()
    assert next(failures, None) is None
    judge.check(driver)


def test_padding_rows_change_nothing(device: ModelRunner) -> None:
    driver = AheadDriver(device, NUM_BLOCKS)
    for index in range(3):
        driver.add(f"{index}", [index + 1] * 4, GREEDY)
    decodes(driver, ["0", "1", "2"], 2)
    steps: Any = device._steps
    before = steps._rows.states[0].clone(), [keys.clone() for keys, _ in device._kv_caches]
    decodes(driver, ["0", "1", "2"], 1)  # as four
    driver.land()
    assert sorted(steps._graphs._row_numbers[:4].tolist()) == [0, 1, 2, MAX_NUM_SEQS]
    assert torch.equal(steps._rows.states[0][3:], before[0][3:])
    for (keys, _), former in zip(device._kv_caches, before[1], strict=True):
        changed = (keys != former).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {request.blocks[-1] for request in driver.requests.values()} | {NUM_BLOCKS}
