"""Models with pictures compute what transformers does, however items and rows are cut, shared and ordered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES, PictureFamily, prepare
from safetensors.torch import load_file, save_file

from llmstack_model_runner.encoders import sliced_encoder
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.layers.step_vectors import Block, StepVectors
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.testing import StepDriver, identity_of
from llmstack_model_runner.toy_vision import places_of
from llmstack_model_runner.weights import load_weights, read_served_config
from llmstack_types import EncoderWork, MediaItem, ModelRunnerConfig, SamplingParams
from llmstack_types.media import num_slices

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
NUM_BLOCKS, NUM_STATE_BLOCKS, NUM_OUTPUTS = 800, 20, 16
GREEDY = SamplingParams(temperature=0.0)
# One representative; `make test-full` has them all.
EACH = [name if name == "idefics3" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]


@dataclass(frozen=True)
class Prompt:
    """Token ids, with items at their places, and what transformers reads besides ids."""

    tokens: list[int]
    items: tuple[MediaItem, ...]
    inputs: dict[str, Any]
    family: PictureFamily

    def all_inputs(self, tokens: list[int]) -> dict[str, Any]:
        return self.inputs | self.family.by_tokens(tokens)


def prompt_of(family: PictureFamily, seeds: Sequence[int], num_before: int = 3) -> Prompt:
    """A prompt with a picture for each seed, and text before, between and behind."""
    ours = family.ours()
    tokens = [(7 * place + 3) % 50 for place in range(num_before)]
    items, values, layouts = [], [], []
    for seed in seeds:
        picture = prepare(ours, family.sizes[seed % len(family.sizes)], seed)
        items.append(replace(picture.item, offset=len(tokens)))
        values.append(picture.values)
        layouts.append(picture.item.layout)
        tokens += [*picture.tokens, (11 * seed + 5) % 50, 7]
    return Prompt(tokens, tuple(items), family.inputs(values, layouts) if items else {}, family)


def expected(reference: Any, prompt: Prompt, count: int = NUM_OUTPUTS) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, and the logits of all places."""
    tokens = list(prompt.tokens)
    with torch.no_grad():
        for _ in range(count):
            logits = reference(input_ids=torch.tensor([tokens]), use_cache=False, **prompt.all_inputs(tokens)).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt.tokens) :], logits


@dataclass(frozen=True)
class Case:
    family: PictureFamily
    folder: Path
    reference: Any


@pytest.fixture(scope="module", params=EACH)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return Case(family, folder, family.write(folder))


def load_model(folder: Path, **overrides: Any) -> CausalLM:
    config, _, _ = read_served_config(ModelRunnerConfig(str(folder), max_model_len=512, **overrides))
    model = make_model(config["architectures"][0], "auto", (config, torch.float32, torch.device("cpu")), Sharding())
    load_weights(model, folder)
    assert isinstance(model, CausalLM)
    return model


def load_runner(folder: Path, **overrides: Any) -> ModelRunner:
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=512, block_size=4, device="cpu", **overrides))
    runner.load_model()
    torch.set_num_threads(1)
    has_states = runner.kv_cache_spec().state_group is not None
    runner.initialize_kv_cache(NUM_BLOCKS, num_state_blocks=NUM_STATE_BLOCKS * has_states)
    return runner


def vectors_of(model: Any, item: MediaItem, part: int = 1000) -> torch.Tensor:
    """The vectors of an item, whose layers or slices run `part` at a time."""
    encoder = model.media_encoder()
    total = encoder.num_layers["image"] * num_slices(item.num_units, encoder.slice_units)
    with torch.inference_mode():
        state = encoder.begin(item, bytearray(item.memory.data))
        for first in range(0, total, part):
            state = encoder.run_layers(item, state, first, min(part, total - first))
        return encoder.finish(item, state)


def chunks_of(model: Any, items: Sequence[MediaItem], num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Runs of so many tokens; where an item's tokens attend to each other, none of them ends inside an item."""
    start = 0
    while start < num_tokens:
        end = min(start + size, num_tokens)
        for item in items:
            if model.media_encoder().is_atomic and item.offset < end < item.end:
                end = item.end if item.offset <= start else item.offset
        yield start, end
        start = end


def positions_of(model: Any, items: Sequence[MediaItem], num_tokens: int) -> torch.Tensor:
    """Positions of all tokens of a prompt on three axes, one token after the other."""
    columns: list[list[int]] = []
    behind = 0
    while len(columns) < num_tokens:
        item = next((item for item in items if item.offset == len(columns)), None)
        axes = None if item is None else model.media_encoder().positions(item)
        own = [[0, 0, 0]] if axes is None else axes.T.tolist()
        columns += [[behind + axis for axis in column] for column in own]
        behind = 1 + max(max(column) for column in columns)
    return torch.tensor(columns).T


def logits_in_chunks(model: CausalLM, tokens: Sequence[int], items: Sequence[MediaItem], size: int) -> torch.Tensor:
    places = torch.tensor(places_of(items), dtype=torch.long)
    vectors = torch.cat([vectors_of(model, item) for item in items])
    on_axes = positions_of(model, items, len(tokens))
    shift = (on_axes[0] - torch.arange(len(tokens))).tolist()
    harness, found = PagedHarness(model, torch.float32, num_blocks=NUM_BLOCKS), []
    for start, end in chunks_of(model, items, len(tokens), size):
        own = (places >= start) & (places < end)
        blocks = tuple(
            Block(0, item.offset + first - start, item.offset + first, item.offset + first + length)
            for item in items
            for first, length in item.embed_runs or ((0, item.num_tokens),)
            if model.media_encoder().is_atomic and start <= item.offset < end
        )
        axes = on_axes[:, places[own]] if model.moves_positions else None
        first, *deep = vectors[own].split(model.vector_size, dim=1)
        given = StepVectors(places[own] - start, first, blocks, axes, tuple(deep)) if own.any() else None
        found.append(harness.step([("a", tokens[start:end])], given, shift=shift[start:end]))
    return torch.cat(found)


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


def whole_work(runner: ModelRunner, media_id: int, item: MediaItem) -> EncoderWork:
    media = runner.kv_cache_spec().media
    assert media is not None
    return EncoderWork(media_id, 0, media.num_layers_of(item), item)


def generate(
    runner: ModelRunner, prompt: Prompt, chunk: int = 1000, lora_name: str | None = None, part: int = 99
) -> list[int]:
    """Encodes the items, `part` layers in a step, then computes the prompt in chunks and some outputs."""
    driver = StepDriver(runner, NUM_BLOCKS)
    numbered = tuple(enumerate(prompt.items, 1))
    driver.add("one", prompt.tokens, GREEDY, media=numbered, lora_name=lora_name)
    encode(driver, runner, numbered, part)
    model, done = runner._model, 0
    for start, end in chunks_of(model, prompt.items, len(prompt.tokens), chunk):
        driver.step({"one": end - start})
        done = end
    assert done == len(prompt.tokens)
    driver.run(NUM_OUTPUTS - 1)
    assert not driver.errors
    driver.remove("one")
    driver.step({}, freed_media=[media_id for media_id, _ in numbered])
    return driver.outputs["one"]


def encode(driver: StepDriver, runner: ModelRunner, numbered: Sequence[tuple[int, MediaItem]], part: int = 99) -> None:
    for media_id, item in numbered:
        total = whole_work(runner, media_id, item).num_layers
        for first in range(0, max(total, 1), part):
            work = EncoderWork(media_id, first, min(part, total - first), None if first else item)
            driver.step({}, encoder_work=[work])


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
        if name.endswith(("q_proj.weight", "down_proj.weight")) and "vision" not in name and "visual" not in name:
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
        with pytest.raises(ValueError, match="bytes are not a picture"):
            encoder.begin(broken, bytearray(data))
        if broken is not item:
            assert encoder.positions(broken) is None
