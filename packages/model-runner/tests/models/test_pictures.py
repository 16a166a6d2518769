"""Models with pictures or sound compute what transformers does, however items and rows are cut, shared and ordered."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.backend_picture_families import BACKEND_FAMILIES
from model_runner_helpers.picture_families import FAMILIES, PictureFamily
from model_runner_helpers.picture_prompts import (
    GREEDY,
    NUM_BLOCKS,
    NUM_OUTPUTS,
    encode,
    expected,
    generate,
    load_model,
    load_runner,
    logits_in_chunks,
    prompt_of,
    vectors_of,
)
from model_runner_helpers.sound_families import SOUND_FAMILIES
from safetensors.torch import load_file, save_file

from llmstack_model_runner.encoders import sliced_encoder
from llmstack_model_runner.memory.sizing import media_bytes
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.testing import StepDriver, identity_of
from llmstack_types import ModelRunnerConfig
from llmstack_types.media import num_slices

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EVERY = FAMILIES | BACKEND_FAMILIES | SOUND_FAMILIES
# One representative of each kind; `make test-full` has them all.
QUICK = ("idefics3", "llava onevision", "qwen 2 audio")
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in EVERY]


@dataclass(frozen=True)
class Case:
    family: PictureFamily
    folder: Path
    reference: Any


@pytest.fixture(scope="module", params=EACH)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = EVERY[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return Case(family, folder, family.write(folder))


@pytest.mark.parametrize("is_hub", [True, False], ids=["hub", "transformers-5"])
def test_logits_are_those_of_transformers(
    case: Case, is_hub: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = case.folder
    if not is_hub:
        folder = tmp_path
        case.family.write(folder, is_hub=False)
    assert find_problems(ModelRunnerConfig(str(folder), max_model_len=512)) == []
    model = load_model(folder)
    assert "unexpected" not in caplog.text
    prompt = prompt_of(case.family, (0, 1))
    outputs, logits = expected(case.reference, prompt, 8)
    tokens = prompt.tokens + outputs[:-1]
    for size in (1000, 23, 7):
        found = logits_in_chunks(model, tokens, prompt.items, size)
        assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))


def test_layers_in_slices_give_the_same_vectors(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    items = prompt_of(case.family, (0, 1)).items
    found = {}
    for slice_units in (10_000, 4):
        monkeypatch.setattr(sliced_encoder, "SLICE_UNITS", slice_units)
        model = load_model(case.folder)
        found[slice_units] = [vectors_of(model, item) for item in items]
    for item, whole, sliced in zip(items, found[10_000], found[4], strict=True):
        assert num_slices(item.num_units, 4) > 2
        torch.testing.assert_close(sliced, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
        for part in (1, 3):
            assert torch.equal(vectors_of(model, item, part), sliced)


@pytest.fixture(scope="module")
def runner(case: Case) -> ModelRunner:
    return load_runner(case.folder)


def test_greedy_tokens_are_those_of_transformers_however_a_prompt_is_cut(case: Case, runner: ModelRunner) -> None:
    prompts = [prompt_of(case.family, seeds, before) for seeds, before in (((0,), 1), ((0, 1), 5), ((2,), 9))]
    prompts += [prompt_of(case.family, seeds) for seeds in ((1, 0), (1, 2, 0), ())]
    outputs = [expected(case.reference, prompt)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        for chunk in (1000, 23, 7):
            assert generate(runner, prompt, chunk) == tokens
    assert generate(runner, prompts[1], part=1) == outputs[1]


def test_eight_requests_together_share_and_lose_and_find_what_was_computed(case: Case, runner: ModelRunner) -> None:
    """Items of one number in several prompts and places; preemption, prefix hits, three copies of a prompt."""
    first, second, swapped, alone = (
        prompt_of(case.family, seeds, before) for seeds, before in (((0, 1), 4), ((0,), 7), ((1, 0), 4), ((), 6))
    )
    media_id_of = {(first.items[0].digest): 1, (first.items[1].digest): 2}
    prompts = [first, second, swapped, alone, first, first, second, alone]
    outputs = [expected(case.reference, prompt)[0] for prompt in prompts]
    driver = StepDriver(runner, NUM_BLOCKS)
    encode(driver, runner, [(1, first.items[0]), (2, first.items[1])])
    for index, prompt in enumerate(prompts):
        media = tuple((media_id_of[item.digest], item) for item in prompt.items)
        driver.add(f"r{index}", prompt.tokens, GREEDY, media=media)
    driver.step({f"r{index}": driver.num_left(f"r{index}") for index in (0, 1, 2, 3)})
    found = driver.share("r4", "r0")
    has_states = runner.kv_cache_spec().state_group is not None
    assert found > first.items[1].end - 4 or has_states  # both pictures; the driver shares no states
    driver.step({f"r{index}": driver.num_left(f"r{index}") for index in range(8)})
    for name in ("r1", "r2"):
        driver.preempt(name)
    driver.step({f"r{index}": driver.num_left(f"r{index}") for index in range(8)})
    while min(map(len, driver.outputs.values())) < NUM_OUTPUTS:
        driver.step({f"r{index}": 1 for index in range(8)})
    assert not driver.errors
    assert [driver.outputs[f"r{index}"][:NUM_OUTPUTS] for index in range(8)] == outputs
    for index in range(8):
        driver.remove(f"r{index}")
    driver.step({}, freed_media=[1, 2])


def test_rounded_weights_are_those_of_the_language_model_alone(case: Case, runner: ModelRunner) -> None:
    rounded = load_runner(case.folder, quantization="int8")
    prompt = prompt_of(case.family, (0,))
    vectors = vectors_of(rounded._model, prompt.items[0])
    assert torch.equal(vectors, vectors_of(runner._model, prompt.items[0]))
    assert generate(rounded, prompt, 7) == generate(rounded, prompt)
    assert rounded.backends()["quantization"] == "int8"


def test_an_adapter_of_the_language_model_is_as_good_as_its_sum(case: Case, tmp_path: Path) -> None:
    weights = load_file(case.folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    factors, merged = {}, dict(weights)
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "down_proj.weight")) and not re.search("vision|visual|audio|^encoder", name):
            a = torch.randn(4, weight.shape[1], generator=generator) * 0.3
            b = torch.randn(weight.shape[0], 4, generator=generator) * 0.3
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            merged[name] = weight + 2 * b @ a
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "down_proj"],
              "base_model_name_or_path": str(case.folder)}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    save_file(factors, adapter / "adapter_model.safetensors")
    for file in case.folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(merged, tmp_path / "model.safetensors", {"format": "pt"})
    reference = type(case.reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = prompt_of(case.family, (0, 1))
    outputs = expected(reference, prompt)[0]
    assert outputs != expected(case.reference, prompt)[0]
    runner = load_runner(case.folder, enable_lora=True)
    identity = identity_of(adapter)
    runner.announce_adapter(identity, str(adapter))
    runner.add_adapter(identity, runner.read_adapter(identity, str(adapter)))
    assert generate(runner, prompt, 23, lora_name=identity) == outputs
    assert generate(runner, prompt) == expected(case.reference, prompt)[0]


def test_without_pictures_no_encoder_is_loaded(case: Case, tmp_path: Path) -> None:
    text = prompt_of(case.family, ())
    outputs = expected(case.reference, text)[0]
    for file in case.folder.iterdir():
        if file.name not in ("preprocessor_config.json", "processor_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for runner in (load_runner(case.folder, language_model_only=True), load_runner(tmp_path)):
        assert runner.kv_cache_spec().media is None
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("one", text.tokens, GREEDY)
        assert driver.run(NUM_OUTPUTS)["one"] == outputs


def test_an_item_of_another_size_is_refused(case: Case, runner: ModelRunner) -> None:
    item, encoder = prompt_of(case.family, (0,)).items[0], runner._model.media_encoder()  # type: ignore[union-attr]
    assert encoder is not None
    assert item.memory is not None
    for broken, data in (
        (item, item.memory.data[:-1]), (item, b""), (replace(item, layout=()), item.memory.data),
        (replace(item, layout=(1 << 40, 1, 1)), item.memory.data),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="bytes are not"):
            encoder.begin(broken, bytearray(data))
        if broken is not item:
            assert encoder.positions(broken) is None


def test_the_memory_profile_counts_what_is_kept_of_a_picture(case: Case) -> None:
    """The cache of the scheduler counts vectors; a family may keep several rows of numbers for each."""
    config = ModelRunnerConfig(str(case.folder), max_model_len=512, encoder_cache_tokens=1000)
    model, spec = load_model(case.folder), load_runner(case.folder).kv_cache_spec()
    encoder = model.media_encoder()
    assert encoder is not None
    item = prompt_of(case.family, (0,)).items[0]
    kept = vectors_of(model, item)
    counted = media_bytes(config, spec, encoder) - encoder.work_bytes
    assert kept.untyped_storage().nbytes() == item.num_vectors * (counted // 1000)
