"""The runner without a scheduler, driven by hand-made steps over a tiny GPT-2."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner import progress_bar
from llmstack_model_runner.model_runner import ModelRunner, ModelRunnerStateError
from llmstack_model_runner.steps.input_batch import InputBatchError
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint, write_gpt2_config
from llmstack_types import (
    EngineStartError,
    KVCacheGroupSpec,
    KVTensorSpec,
    ModelRunnerConfig,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8], "c": [50, 40, 30, 20, 10] * 4, "d": [96]}


def make_runner(folder: Path, **overrides: object) -> ModelRunner:
    values: dict[str, object] = {"load_format": "dummy", "max_model_len": 128, "block_size": 4, "device": "cpu"}
    runner = ModelRunner(ModelRunnerConfig(str(write_gpt2_config(folder)), **{**values, **overrides}))  # type: ignore[arg-type]  # test values
    runner.load_model()
    return runner


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"))
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=128, block_size=4, device="cpu"))
    runner.load_model()
    # Matrices this small gain nothing from a second thread, which waits long on a busy machine.
    torch.set_num_threads(1)
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.fixture
def runner(loaded: ModelRunner) -> Iterator[ModelRunner]:
    """The shared runner, with new KV storage where a test leaves requests behind."""
    yield loaded
    loaded.initialize_kv_cache(NUM_BLOCKS)


def alone(runner: ModelRunner, prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("alone", prompt, params)
    output = driver.run(num_tokens)["alone"]
    driver.remove("alone")
    driver.step({})
    return output


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_any_schedule_gives_the_tokens_of_each_request_alone(loaded: ModelRunner, seed: int, is_greedy: bool) -> None:
    """Chunks, mixes, orders and preemptions: greedy or seeded, the text is the same."""
    params = GREEDY if is_greedy else SamplingParams(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.2)
    num_tokens = 5
    expected = {name: alone(loaded, prompt, params, num_tokens) for name, prompt in PROMPTS.items()}
    schedule = random.Random(seed)
    driver = StepDriver(loaded, NUM_BLOCKS)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, params)
    while unfinished := [name for name in PROMPTS if len(driver.outputs[name]) < num_tokens]:
        chosen = schedule.sample(unfinished, schedule.randint(1, len(unfinished)))
        driver.step({name: schedule.randint(1, driver.num_left(name)) for name in chosen})
        if schedule.random() < 0.2:
            driver.preempt(schedule.choice(chosen))
    for name in PROMPTS:
        driver.remove(name)
    driver.step({})
    assert driver.outputs == expected


def test_outputs_of_the_tiny_model_differ(loaded: ModelRunner) -> None:
    """Otherwise the tests of equality would prove little."""
    outputs = [alone(loaded, prompt, GREEDY, 8) for prompt in PROMPTS.values()]
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_a_row_reads_blocks_that_another_row_of_the_same_step_fills(runner: ModelRunner) -> None:
    prompt = list(range(1, 10))
    expected = alone(runner, prompt, GREEDY, 1)
    output = runner.execute_model(
        SchedulerOutput(
            1,
            [NewRequest("reads", prompt, 9, GREEDY), NewRequest("fills", prompt, 9, GREEDY)],
            [ScheduledRequest("reads", 8, 1, [20, 21, 23]), ScheduledRequest("fills", 0, 9, [20, 21, 22])],
        )
    ).result()
    assert output.sampled_token_ids == [expected, expected]


def test_chunks_of_a_prefill_sample_nothing_and_results_keep_the_order_of_the_rows(runner: ModelRunner) -> None:
    driver = StepDriver(runner, NUM_BLOCKS)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, GREEDY)
    output = driver.step({"c": 3, "b": 2, "a": 6, "d": 1})
    assert output.request_ids == ["c", "b", "a", "d"]
    assert [len(token_ids) for token_ids in output.sampled_token_ids] == [0, 1, 0, 1]


def test_prompt_logprobs_of_any_chunks_equal_one_full_pass(runner: ModelRunner) -> None:
    prompt = PROMPTS["c"]
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3)
    whole = StepDriver(runner, NUM_BLOCKS)
    whole.add("whole", prompt, params)
    first = whole.step({"whole": len(prompt)})
    entries = first.prompt_logprobs["whole"]
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    whole.remove("whole")
    whole.step({})
    for sizes in ([1] * len(prompt), [7, 7, 6], [19, 1]):
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("parts", prompt, params)
        outputs = [driver.step({"parts": size}) for size in sizes]
        parts = [entry for output in outputs for entry in output.prompt_logprobs.get("parts", [])]
        assert [(part.token_ids, part.rank) for part in parts] == [(e.token_ids, e.rank) for e in entries]
        for part, entry in zip(parts, entries, strict=True):
            assert part.logprobs == pytest.approx(entry.logprobs, abs=1e-5)
        assert driver.step({"parts": 1}).prompt_logprobs == {}
        driver.remove("parts")
        driver.step({})


def test_logprobs_are_those_of_a_full_pass_and_name_the_chosen_token(runner: ModelRunner) -> None:
    """The sampled token's entry equals the entry of the same token as part of a prompt."""
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2, logit_bias={5: 50.0})
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], params)
    (entry,) = driver.step({"a": 3}).logprobs["a"]
    assert entry.token_ids[0] == driver.outputs["a"][0] == 5
    driver.add("b", [1, 2, 3, 5], params)
    in_prompt = driver.step({"b": 4}).prompt_logprobs["b"][-1]
    assert in_prompt.token_ids == entry.token_ids
    assert in_prompt.logprobs == pytest.approx(entry.logprobs, abs=1e-5)


def test_a_row_whose_logits_are_not_numbers_fails_alone(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(runner, PROMPTS["b"], GREEDY, 2)
    model = runner._model
    assert model is not None
    compute_logits = model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden).clone()
        logits[0] = torch.nan
        return logits

    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", PROMPTS["a"], SamplingParams(seed=1, logprobs=1))
    driver.add("b", PROMPTS["b"], GREEDY)
    monkeypatch.setattr(model, "compute_logits", broken)
    output = driver.step({"a": 7, "b": 2})
    monkeypatch.undo()
    assert list(output.errors) == ["a"]
    assert "no usable probabilities" in output.errors["a"]
    assert output.sampled_token_ids[0] == []
    assert output.logprobs == {}
    driver.remove("a")
    driver.step({"b": 1})
    assert driver.outputs["b"] == expected


def test_min_tokens_masks_the_end_until_reached_across_a_resume(runner: ModelRunner) -> None:
    prompt = PROMPTS["a"]
    (end,) = alone(runner, prompt, GREEDY, 1)
    driver = StepDriver(runner, NUM_BLOCKS)
    # The bias makes it the choice of every step that may take it.
    driver.add("a", prompt, SamplingParams(temperature=0.0, min_tokens=3, logit_bias={end: 90.0}), eos=(end,))
    driver.step({"a": len(prompt)})
    driver.preempt("a")
    for _ in range(3):
        driver.step({"a": driver.num_left("a")})
    output = driver.outputs["a"]
    assert end not in output[:3]
    assert output[3] == end


def test_an_empty_step_applies_its_removals(runner: ModelRunner) -> None:
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("a", [1], GREEDY)
    driver.step({"a": 1})
    driver.remove("a")
    output = driver.step({})
    assert output.request_ids == []
    with pytest.raises(InputBatchError, match="'a' is scheduled"):
        runner.execute_model(SchedulerOutput(9, [], [ScheduledRequest("a", 1, 1, [])]))


def test_results_may_be_read_late_and_twice(runner: ModelRunner) -> None:
    request = NewRequest("a", [1, 2], 2, GREEDY)
    first = runner.execute_model(SchedulerOutput(1, [request], [ScheduledRequest("a", 0, 2, [0])]))
    second = runner.execute_model(SchedulerOutput(2, [], [ScheduledRequest("a", 2, 1, [])]))
    tokens = [first.result().sampled_token_ids[0][0], second.result().sampled_token_ids[0][0]]
    assert first.result() is first.result()
    runner.execute_model(SchedulerOutput(3, removed_request_ids=["a"])).result()
    assert tokens == alone(runner, [1, 2], GREEDY, 2)


def test_spec_and_memory_are_those_of_the_model(loaded: ModelRunner) -> None:
    spec = loaded.kv_cache_spec()
    assert (spec.num_layers, spec.vocab_size) == (2, 97)
    tensors = tuple(KVTensorSpec(name, (4, spec.block_size, 8), "float32") for name in ("keys", "values"))
    assert spec.groups == (KVCacheGroupSpec((0, 1), tensors=tensors),)
    assert spec.groups[0].bytes_per_block == spec.bytes_per_block
    assert (spec.block_size, spec.dtype, spec.device) == (4, "float32", "cpu")
    assert spec.bytes_per_block == 2 * 2 * 4 * 8 * 4 * 4
    # Not more than 256 requests of 128 tokens can fill.
    assert loaded.available_kv_bytes() == 256 * 32 * spec.bytes_per_block
    # A user who gives a size may want to cache more.
    assert loaded.available_kv_bytes(is_size_given=True) > 256 * 32 * spec.bytes_per_block
    assert "paged_attention" in loaded.backends()
    assert loaded.backends()["caches"].startswith("L1d ")
    assert loaded.backends()["torch"].startswith(torch.__version__)  # hosts with another one may not compute equal bits


def test_steps_are_timed_by_phase(runner: ModelRunner) -> None:
    before = runner.timing.num_steps
    alone(runner, [1, 2, 3], GREEDY, 2)
    assert runner.timing.num_steps == before + 2
    phases_s = runner.timing.phases_s
    assert all(phases_s[name] > 0.0 for name in ("prepare", "forward", "sample"))
    assert phases_s["wait"] == 0.0
    assert runner.timing.host_s == sum(phases_s.values())


def test_each_layer_of_an_eager_step_reports_progress_and_a_replay_none(runner: ModelRunner) -> None:
    reports: list[None] = []
    runner.report_progress_to(lambda: reports.append(None))
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("r", [1, 2, 3, 4, 5], GREEDY)
    driver.step({"r": 5})
    num_layers = runner.kv_cache_spec().num_layers
    assert len(reports) >= num_layers
    driver.step({"r": 1})  # captured now at the latest
    reports.clear()
    driver.step({"r": 1})
    is_captured = str(runner.backends()["decode"]).startswith("captured")
    assert len(reports) == 0 if is_captured else len(reports) >= num_layers


def test_a_terminal_shows_how_far_loading_and_warm_up_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress_bar, "REDRAWN_AFTER_S", 0.0)
    make_runner(tmp_path).initialize_kv_cache(NUM_BLOCKS)
    lines = terminal.getvalue().split("\r\x1b[2K")
    assert any(line.startswith("load and pack weights █") for line in lines)
    assert any(line.startswith("warm up █") for line in lines)
    assert lines[-1] == ""


def test_more_tokens_than_the_model_has_positions_are_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2048 .* 128 positions"):
        make_runner(tmp_path, max_model_len=2048)


@pytest.mark.parametrize("device", ["tpu", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        make_runner(tmp_path, device=device)


def test_a_gpu_that_the_kernels_are_not_made_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"capability 7\.5, and 8\.0 is needed"):
        make_runner(tmp_path, device="auto")
    assert make_runner(tmp_path, device="cpu").backends()


@pytest.mark.parametrize("architectures", [None, [], [7], "GPT2LMHeadModel"])
def test_a_configuration_without_architecture_is_refused(tmp_path: Path, architectures: object) -> None:
    write_gpt2_config(tmp_path, architectures=architectures)
    runner = ModelRunner(ModelRunnerConfig(str(tmp_path), load_format="dummy", max_model_len=64))
    with pytest.raises(ValueError, match="architecture"):
        runner.load_model()


def test_missing_weights_are_one_sentence_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="has no safetensors weights"):
        make_runner(tmp_path, load_format="auto")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_run_and_repeat(tmp_path: Path, dtype: str) -> None:
    runner = make_runner(tmp_path, dtype=dtype)
    runner.initialize_kv_cache(16)
    assert runner.kv_cache_spec().dtype == dtype
    assert alone(runner, [1, 2, 3], GREEDY, 4) == alone(runner, [1, 2, 3], GREEDY, 4)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_storage_too_small_for_the_warm_up_is_no_error(tmp_path: Path, num_blocks: int) -> None:
    runner = make_runner(tmp_path, max_num_seqs=1)
    runner.initialize_kv_cache(num_blocks)
    assert len(alone(runner, [1], GREEDY, 2)) == 2


def test_calls_out_of_order_raise_and_shutdown_may_be_repeated(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    with pytest.raises(ModelRunnerStateError, match="not initialized"):
        runner.execute_model(SchedulerOutput(0))
    with pytest.raises(ModelRunnerStateError, match="not loaded"):
        ModelRunner(ModelRunnerConfig("nowhere")).kv_cache_spec()
    runner.shutdown()
    runner.shutdown()
    with pytest.raises(ModelRunnerStateError):
        runner.execute_model(SchedulerOutput(0))


def test_importing_the_runner_imports_torch_and_nothing_else_heavy() -> None:
    code = (
        "import sys, llmstack_model_runner.model_runner;"
        "print([m for m in ('transformers', 'torch._dynamo', 'torch._inductor', 'sympy', 'scipy', 'pydantic',"
        " 'llmstack_gguf', 'llmstack_model_runner.checkpoint_formats.read')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_values_in_place_of_those_in_the_configuration_shape_the_model(tmp_path: Path):
    one = make_runner(tmp_path).kv_cache_spec()
    two = make_runner(tmp_path, hf_overrides='{"n_layer": 1}').kv_cache_spec()
    assert (one.num_layers > 1, two.num_layers) == (True, 1)
