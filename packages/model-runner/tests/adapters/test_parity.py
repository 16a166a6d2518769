"""Tokens under an adapter are those of the model that it is merged into, alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from model_runner_helpers.merged import EXPERTS, FAMILY_TO_TARGETS, write_config, write_merged

from llmstack_kernels.testing import runs_native_kernels
from llmstack_model_runner.layers import adaptation
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_random_adapter, write_random_weights
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 128, 4, 12
PROMPTS = ([5, 17, 2, 44, 8, 1, 30], [5, 17, 2, 44, 90, 3], [11])
QUICK = ("GPT2LMHeadModel", "MixtralForCausalLM")  # Llama is in the next test
# Decode steps of narrower heads are not captured.
CAPTURED = {"GPT2LMHeadModel": {"n_embd": 64}, "LlamaForCausalLM": {"hidden_size": 64}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


def make_driver(folder: Path, adapters: dict[str, Path], dtype: str = "float32", **overrides: object) -> StepDriver:
    settings: dict[str, object] = {"max_loras": 2, "max_lora_rank": 8, "enable_lora": bool(adapters), **overrides}
    runner = ModelRunner(
        ModelRunnerConfig(str(folder), dtype=dtype, max_model_len=64, block_size=BLOCK_SIZE, **settings)  # type: ignore[arg-type]  # by name
    )
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    for identity, path in adapters.items():
        runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
    return StepDriver(runner, NUM_BLOCKS)


def outputs_of(folder: Path) -> list[list[int]]:
    """What a model without adapters generates for each prompt, alone."""
    driver = make_driver(folder, {})
    found = []
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt, GREEDY)
        found.append(list(driver.run(NUM_TOKENS)[str(number)]))
        driver.remove(str(number))
    return found


class Models:
    """A base model, two adapters, and both merged."""

    def __init__(
        self, folder: Path, architecture: str, sizes: Mapping[str, int] = MappingProxyType({}), **of_first: object
    ) -> None:
        self.base = write_random_weights(write_config(folder / "base", architecture, **sizes), spread=0.3)
        targets = FAMILY_TO_TARGETS[architecture][1]
        paths = [
            write_random_adapter(folder / "a", self.base, targets, seed=1, **of_first),  # type: ignore[arg-type]  # by name
            write_random_adapter(folder / "b", self.base, targets[:1], seed=2, rank=7, use_rslora=True),
        ]
        self.names = [identity_of(path, path.name) for path in paths]
        self.adapters = dict(zip(self.names, paths, strict=True))
        merged = [write_merged(folder / f"merged-{path.name}", self.base, path) for path in paths]
        self.expected = [outputs_of(folder) for folder in (self.base, *merged)]


@pytest.mark.parametrize(
    "architecture",
    [
        architecture if architecture in QUICK else pytest.param(architecture, marks=pytest.mark.full)
        for architecture in FAMILY_TO_TARGETS
    ],
)
def test_tokens_are_those_of_the_merged_model(architecture: str, tmp_path: Path) -> None:
    models = Models(tmp_path, architecture)
    assert models.expected[0] != models.expected[1] != models.expected[2]
    driver = make_driver(models.base, models.adapters)
    for name, expected in zip((None, *models.names), models.expected, strict=True):
        for number, prompt in enumerate(PROMPTS):
            driver.add(f"{name} {number}", prompt, GREEDY, lora_name=name)
            assert driver.run(NUM_TOKENS)[f"{name} {number}"] == expected[number]
            driver.remove(f"{name} {number}")
    for slot, name in enumerate((None, *models.names)):
        for number, prompt in enumerate(PROMPTS):
            driver.add(f"mixed {slot} {number}", prompt, GREEDY, lora_name=name)
    mixed = driver.run(NUM_TOKENS)
    for slot, expected in enumerate(models.expected):
        assert [mixed[f"mixed {slot} {number}"] for number in range(len(PROMPTS))] == expected
    assert not driver.errors


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_tokens_with_all_experts_of_a_layer_are_those_of_the_merged_model(architecture: str, tmp_path: Path) -> None:
    models = Models(tmp_path, architecture, target_parameters=EXPERTS, rank_pattern={"down_proj": 3})
    driver = make_driver(models.base, models.adapters)
    for slot, name in enumerate((None, *models.names)):
        for number, prompt in enumerate(PROMPTS):
            driver.add(f"{slot} {number}", prompt, GREEDY, lora_name=name)
    mixed = driver.run(NUM_TOKENS)
    for slot, expected in enumerate(models.expected):
        assert [mixed[f"{slot} {number}"] for number in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_an_adapter_keep_their_bits_beside_changed_experts(dtype: str, tmp_path: Path) -> None:
    models = Models(tmp_path, "MixtralForCausalLM", target_parameters=EXPERTS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=3)

    def run(adapters: dict[str, Path], names: Sequence[str | None]) -> list[object]:
        driver, found = make_driver(models.base, adapters, dtype), []
        for name in names:
            driver.add(str(name), PROMPTS[0], params, lora_name=name)
        for _ in range(NUM_TOKENS):
            output = driver.step({str(name): driver.num_left(str(name)) for name in names})
            found.append(output.logprobs["None"])
        return found

    assert run(models.adapters, (models.names[0], None, models.names[1])) == run({}, (None,))


def test_chunks_preemption_prefix_hits_and_drafts_change_no_token(tmp_path: Path) -> None:
    models = Models(tmp_path, "LlamaForCausalLM", rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3})
    driver = make_driver(models.base, models.adapters, max_num_drafts=3)
    for slot, name in enumerate((None, *models.names)):
        driver.add(f"{slot}", PROMPTS[0], GREEDY, lora_name=name)
    driver.step({"0": 3, "1": 2, "2": 7})
    driver.step({"0": 4, "1": 1, "2": 1})
    driver.preempt("2")
    driver.add("second", PROMPTS[0], GREEDY, lora_name=models.names[0])
    driver.step({"1": 4, "2": 3})
    assert driver.share("second", "1") == BLOCK_SIZE
    driver.step({"2": driver.num_left("2"), "second": driver.num_left("second")})
    right = models.expected[1][0]
    done = len(driver.outputs["1"])
    driver.step({"1": 1}, {"1": right[done : done + 2]})
    assert len(driver.outputs["1"]) == done + 3
    driver.step({"1": 1, "0": 1}, {"1": [96, 96]})
    driver.run(NUM_TOKENS)
    for slot, expected in enumerate(models.expected):
        assert driver.outputs[f"{slot}"][:NUM_TOKENS] == expected[0]
    assert driver.outputs["second"][:NUM_TOKENS] == right


def test_logprobs_of_prompt_tokens_are_those_of_the_merged_model(tmp_path: Path) -> None:
    models = Models(tmp_path, "LlamaForCausalLM")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)

    def logprobs_of(driver: StepDriver, name: str | None) -> list[float]:
        driver.add("base", PROMPTS[1], params)
        driver.add("short", PROMPTS[2], GREEDY, lora_name=name)
        driver.add("asked", PROMPTS[0], params, lora_name=name)
        output = driver.step({request_id: driver.num_left(request_id) for request_id in ("base", "short", "asked")})
        return [logprob for entry in output.prompt_logprobs["asked"] for logprob in entry[1][:1]]

    found = logprobs_of(make_driver(models.base, models.adapters), models.names[0])
    merged = logprobs_of(make_driver(tmp_path / "merged-a", {}), None)
    assert len(found) == len(PROMPTS[0]) - 1
    assert found == pytest.approx(merged, abs=1e-4)


@pytest.mark.skipif(not runs_native_kernels(), reason="nothing is captured without native kernels")
def test_captured_steps_and_adapters_in_turn_have_the_bits_of_other_steps(tmp_path: Path) -> None:
    models = Models(tmp_path, "LlamaForCausalLM", CAPTURED["LlamaForCausalLM"])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1)
    seen = []
    for max_loras, enforce_eager in ((2, True), (1, False)):
        driver = make_driver(models.base, models.adapters, "bfloat16", max_loras=max_loras, enforce_eager=enforce_eager)
        found: dict[str, list[object]] = {}
        for name in (None, *models.names):
            driver.add(str(name), PROMPTS[0], params, lora_name=name)
        names = [str(name) for name in (None, *models.names)]
        for _ in range(NUM_TOKENS):
            steps = [names] if max_loras == 2 else [names[:2], names[2:]]
            for step in steps:
                output = driver.step({name: driver.num_left(name) for name in step})
                for name, logprobs in output.logprobs.items():
                    found.setdefault(name, []).extend(logprobs)
        seen.append((dict(driver.outputs), found))
    assert len(seen[0][1]) == 3
    assert seen[0] == seen[1]


@pytest.mark.skipif(not runs_native_kernels(), reason="nothing is captured without native kernels")
@pytest.mark.parametrize("architecture", CAPTURED)
def test_layers_are_updated_from_the_first_adapter_on_that_changes_them(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(tmp_path, architecture, CAPTURED[architecture])
    wide, narrow = models.names
    updated: set[int] = set()

    def note(function: Callable[..., None], index: int) -> Callable[..., None]:
        def update(*arguments: Any) -> None:
            updated.add(arguments[index])
            function(*arguments)

        return update

    monkeypatch.setattr(adaptation, "add_low_rank_", note(adaptation.add_low_rank_, 3))
    name = "add_low_rank_to_embedding_"
    monkeypatch.setattr(adaptation, name, note(adaptation.add_low_rank_to_embedding_, 3))

    def run(driver: StepDriver, names: Sequence[str | None]) -> tuple[list[list[int]], dict[str, list[object]]]:
        """Tokens and log-probabilities of all prompts under the adapters, in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1)
        requests = {f"{name} {number}": name for name in names for number in range(len(PROMPTS))}
        for request, adapter in requests.items():
            driver.add(request, PROMPTS[int(request[-1])], params, lora_name=adapter)
        found: dict[str, list[object]] = {}
        for _ in range(NUM_TOKENS):
            output = driver.step({request: driver.num_left(request) for request in requests})
            for request, logprobs in output.logprobs.items():
                found.setdefault(request, []).extend(logprobs)
        tokens = [list(driver.outputs[request]) for request in requests]
        for request in requests:
            driver.remove(request)
        return tokens, found

    for dtype in ("float32", "bfloat16"):
        driver, other = make_driver(models.base, models.adapters, dtype), make_driver(models.base, {}, dtype)
        steps: Any = driver._runner._steps
        adapters = [driver._runner._store.read(name, str(models.adapters[name])) for name in (wide, narrow)]
        num_layers = driver._runner._store._layers.num_layers
        of_wide, of_narrow = ({n for n in range(num_layers) if one.changes(n)} for one in adapters)
        assert of_narrow < of_wide

        base = run(driver, (None,))
        assert not updated
        assert base == run(other, (None,))
        first = run(driver, (None, narrow))
        assert updated == of_narrow
        assert {key[1] for key in steps._graphs._graphs} == {0, len(of_narrow)}
        updated.clear()

        both = run(driver, (None, narrow, wide))
        assert updated == of_wide
        assert {key[1] for key in steps._graphs._graphs} == {0, len(of_wide)}
        assert run(driver, (None, narrow)) == first  # now all layers of the other adapter are updated too
        assert both[1].items() >= first[1].items()
        assert first[1].items() >= base[1].items()
        if dtype == "float32":
            base_tokens, *merged = models.expected
            assert both[0] == [*base_tokens, *merged[1], *merged[0]]
        updated.clear()
