"""Items in prompts: a toy encoder's vectors give the tokens of a reference, however work and rows are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.cpu_stand_in import CpuStandIn
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from llmstack_model_runner import toy_vision
from llmstack_model_runner.media.store import MediaWorkError
from llmstack_model_runner.memory import sizing
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_model_runner.toy_vision import given_item, places_of, toy_item, toy_vectors, write_toy_vision
from llmstack_types import EncoderWork, MediaItem, MediaMemory, ModelRunnerConfig, QuarantinedError, SamplingParams

NUM_BLOCKS, NUM_LAYERS, NUM_OUTPUTS = 64, 3, 6
GREEDY = SamplingParams(temperature=0.0)
PICTURES = [random.Random(seed).randbytes(n * toy_vision.PATCH) for seed, n in enumerate((9, 5, 14))]
IMAGE, SIZE = 96, 64
Numbered = tuple[tuple[int, MediaItem], ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_vision(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(toy_vision.register_toy_vision(tmp_path_factory.mktemp("registered"))))
        yield


def load(folder: Path, runtime: CpuStandIn | None = None, **overrides: Any) -> ModelRunner:
    values = {"max_model_len": 128, "block_size": 4, "device": "cpu", "enable_prompt_embeds": True, **overrides}
    runner = ModelRunner(ModelRunnerConfig(str(folder), **values), runtime)
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def loaded(folder: Path, registered: None) -> ModelRunner:
    return load(folder)


@pytest.fixture
def runner(loaded: ModelRunner) -> ModelRunner:
    """The shared runner without what an earlier test has left."""
    loaded.initialize_kv_cache(NUM_BLOCKS)
    return loaded


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    weights = load_file(folder / "model.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**toy_vision._LLAMA, tie_word_embeddings=False, attn_implementation="eager"))
    model.load_state_dict({name: tensor for name, tensor in weights.items() if not name.startswith("vision.")})
    return model.eval()


def expected_tokens(
    reference: LlamaForCausalLM, prompt: Sequence[int], items: Sequence[MediaItem], vectors: Sequence[torch.Tensor]
) -> list[int]:
    """Greedy tokens of transformers, with the vectors in their places by hand."""
    embed, outputs = reference.get_input_embeddings(), []
    with torch.inference_mode():
        embedded = embed(torch.tensor(prompt))
        if items:
            embedded[places_of(items)] = torch.cat(list(vectors))
        for _ in range(NUM_OUTPUTS):
            outputs.append(int(reference(inputs_embeds=embedded[None]).logits[0, -1].argmax()))
            embedded = torch.cat([embedded, embed(torch.tensor(outputs[-1:]))])
    return outputs


def whole(media_id: int, item: MediaItem) -> EncoderWork:
    return EncoderWork(media_id, 0, NUM_LAYERS if item.kind == "image" else 0, item)


def prompt_of(items: Sequence[MediaItem], num_tokens: int) -> list[int]:
    prompt = [(7 * place + 3) % 90 for place in range(num_tokens)]
    for item in items:
        prompt[item.offset : item.end] = [IMAGE] * item.num_tokens
    return prompt


def generate(runner: ModelRunner, prompt: list[int], media: Numbered, chunk: int = 1000) -> list[int]:
    """Encodes all items, then computes the prompt in chunks and some outputs; frees what it has used."""
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("one", prompt, GREEDY, media=media)
    driver.step({}, encoder_work=[whole(*numbered) for numbered in media])
    while len(driver.outputs["one"]) < NUM_OUTPUTS:
        driver.step({"one": min(chunk, driver.num_left("one"))})
    assert not driver.errors
    driver.remove("one")
    driver.step({}, freed_media=[media_id for media_id, _ in media])
    return driver.outputs["one"]


def two_pictures() -> list[MediaItem]:
    return [toy_item(PICTURES[0], 3), toy_item(PICTURES[1], 14, num_breaks=2)]


def test_tokens_are_those_of_vectors_put_in_by_hand(
    runner: ModelRunner, reference: LlamaForCausalLM, folder: Path
) -> None:
    items = two_pictures()
    vectors = [toy_vectors(folder, data) for data in PICTURES[:2]]
    prompt = prompt_of(items, 27)
    expected = expected_tokens(reference, prompt, items, vectors)
    numbered = tuple(enumerate(items, 1))
    assert generate(runner, prompt, numbered) == expected
    swapped = [toy_item(PICTURES[1], 3, num_breaks=2), toy_item(PICTURES[0], 14)]
    other = expected_tokens(reference, prompt_of(swapped, 27), swapped, vectors[::-1])
    assert generate(runner, prompt_of(swapped, 27), tuple(enumerate(swapped, 3))) == other != expected
    # The same vectors given by the user, at the end of a prompt and as its only token too.
    given = [given_item(vectors[0], 3)]
    mixed = expected_tokens(reference, prompt_of(given, 12), given, vectors[:1])
    assert generate(runner, prompt_of(given, 12), ((9, given[0]),)) == mixed
    one = [given_item(vectors[0][:1], 0)]
    assert generate(runner, [0], ((10, one[0]),)) == expected_tokens(reference, [0], one, [vectors[0][:1]])


def test_no_cut_of_a_prompt_changes_a_bit(runner: ModelRunner) -> None:
    items = [*two_pictures(), given_item(torch.randn(4, SIZE), 22)]
    prompt, numbered = prompt_of(items, 26), tuple(enumerate(items, 1))
    logprobs = SamplingParams(temperature=0.0, logprobs=5)
    found = []
    for chunk in (1000, 1, 7, 23):
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("one", prompt, logprobs, media=numbered)
        driver.step({}, encoder_work=[whole(*one) for one in numbered])
        outputs = []
        while len(outputs) < NUM_OUTPUTS:
            outputs += driver.step({"one": min(chunk, driver.num_left("one"))}).logprobs.get("one", [])
        found.append((driver.outputs["one"], outputs))
        driver.remove("one")
        driver.step({}, freed_media=[media_id for media_id, _ in numbered])
    assert found[1:] == found[:1] * 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_any_schedule_of_work_and_rows_gives_the_tokens_of_each_request_alone(loaded: ModelRunner, seed: int) -> None:
    """Two requests share an item; layers of items come in parts, in any order, between and beside chunks of rows."""
    loaded.initialize_kv_cache(NUM_BLOCKS)
    schedule = random.Random(seed)
    items = {1: toy_item(PICTURES[0], 2), 2: toy_item(PICTURES[2], 11, num_breaks=1), 3: toy_item(PICTURES[0], 5)}
    media: dict[str, Numbered] = {"a": ((1, items[1]), (2, items[2])), "b": ((1, items[3]),), "c": ()}
    prompts = {name: prompt_of([item for _, item in own], 29) for name, own in media.items()}
    expected = {name: generate(loaded, prompts[name], media[name]) for name in media}
    driver = StepDriver(loaded, NUM_BLOCKS)
    for name, prompt in prompts.items():
        driver.add(name, prompt, GREEDY, media=media[name])
    done = {1: 0, 2: 0}
    computed = dict.fromkeys(prompts, 0)
    while min(map(len, driver.outputs.values())) < NUM_OUTPUTS:
        work = []
        for media_id, start in done.items():
            count = schedule.randint(0, NUM_LAYERS - start)
            if count:
                work.append(EncoderWork(media_id, start, count, items[media_id] if not start else None))
                done[media_id] += count
        schedule.shuffle(work)
        rows = {}
        for name in schedule.sample(sorted(prompts), 3):
            left = driver.num_left(name)
            missing = [item.offset for media_id, item in media[name] if done[media_id] < NUM_LAYERS]
            ready = min([left, *(offset - computed[name] for offset in missing if offset >= computed[name])])
            if ready and len(driver.outputs[name]) < NUM_OUTPUTS:
                rows[name] = schedule.randint(1, ready)
                computed[name] += rows[name]
        driver.step(rows, encoder_work=work)
    assert driver.outputs == expected


def test_the_last_place_of_a_prompt_alone_is_no_captured_step(folder: Path) -> None:
    """With graphs on a CPU, and with those of a device: a vector at the only token of a row that samples."""
    items = [toy_item(PICTURES[1], 4)]
    prompt, numbered = prompt_of(items, 9), ((1, items[0]),)
    expected = generate(load(folder, enforce_eager=True), prompt, numbered)
    other = generate(load(folder, enforce_eager=True), prompt, ((1, toy_item(PICTURES[1][::-1], 4)),))
    for runtime in (None, CpuStandIn()):
        runner = load(folder, runtime)
        for chunk in (1, 8, 9):
            assert generate(runner, prompt, numbered, chunk) == expected != other


@pytest.mark.parametrize("runtime", [None, CpuStandIn()], ids=["host", "device"])
def test_a_broken_item_ends_the_requests_with_it_and_no_others(
    folder: Path, tmp_path: Path, runtime: CpuStandIn | None
) -> None:
    runner = load(folder, runtime)
    good = toy_item(PICTURES[0], 3)
    expected = generate(runner, prompt_of([good], 20), ((1, good),))
    text = generate(runner, prompt_of([], 20), ())
    broken = {
        2: toy_item(PICTURES[0], 3, path=str(tmp_path / "gone")),
        3: MediaItem(bytes(32), "image", 3, 9, num_units=9, memory=MediaMemory(35, data=bytes(35))),
        4: given_item(torch.full((9, SIZE), torch.nan), 3),
        5: MediaItem(bytes(32), "embeds", 3, 9, memory=MediaMemory(36, data=bytes(36))),
        6: MediaItem(bytes(32), "image", 3, 9, num_units=9),
    }
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("good", prompt_of([good], 20), GREEDY, media=((7, good),))
    driver.add("text", prompt_of([], 20), GREEDY)
    for media_id, item in broken.items():
        driver.add(f"bad {media_id}", prompt_of([item], 20), GREEDY, media=((media_id, item),))
    driver.step(dict.fromkeys(driver.outputs, 3), encoder_work=[whole(7, good)])
    driver.step({}, encoder_work=[whole(media_id, item) for media_id, item in broken.items()])
    assert not driver.errors  # so far no row needs them
    driver.step(dict.fromkeys(driver.outputs, 17))
    assert driver.errors == {
        "bad 2": QuarantinedError.MEDIA_UNREADABLE, "bad 6": QuarantinedError.MEDIA_UNREADABLE,
        **{f"bad {media_id}": QuarantinedError.MEDIA_NOT_ENCODABLE for media_id in (3, 4, 5)},
    }  # fmt: skip
    for name in driver.errors:
        driver.remove(name)
    for _ in range(NUM_OUTPUTS - 1):
        driver.step({"good": 1, "text": 1})
    assert (driver.outputs["good"], driver.outputs["text"]) == (expected, text)
    # A number that was freed may be another item's.
    driver.step({}, freed_media=[*broken])
    driver.remove("good")
    driver.add("again", prompt_of([good], 20), GREEDY, media=((2, good),))
    driver.step({"again": 20}, encoder_work=[whole(2, good)])
    assert driver.outputs["again"] == expected[:1]


def test_a_part_that_fails_once_is_encoded_again_from_where_it_began(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = toy_item(PICTURES[2], 3)
    prompt = prompt_of([item], 20)
    expected = generate(runner, prompt, ((1, item),))
    model = runner._model
    assert isinstance(model, toy_vision.ToyVision)
    run_layers, forward, failures = model._encoder.run_layers, model.forward, [0, 0]

    def run_short(item: MediaItem, state: Any, first: int, count: int) -> Any:
        found = run_layers(item, state, first, count)
        if first == 1 and not failures[0]:
            failures[0] = 1
            raise torch.OutOfMemoryError("out of memory")
        return found

    def forward_short(*arguments: Any) -> torch.Tensor:
        if not failures[1]:
            failures[1] = 1
            raise torch.OutOfMemoryError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(model._encoder, "run_layers", run_short)
    monkeypatch.setattr(model, "forward", forward_short)
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("one", prompt, GREEDY, media=((1, item),))
    driver.step({}, encoder_work=[EncoderWork(1, 0, 1, item)])
    driver.step({}, encoder_work=[EncoderWork(1, 1, 1)])
    driver.step({"one": 20}, encoder_work=[EncoderWork(1, 1, 1), EncoderWork(1, 2, 1)])  # one part was done before
    assert failures == [1, 1]
    driver.step({}, encoder_work=[whole(1, item)])  # all of it was
    driver.run(NUM_OUTPUTS - 1)
    assert driver.outputs["one"] == expected
    monkeypatch.setattr(model._encoder, "run_layers", run_layers)


def test_work_that_does_not_follow_what_was_done_is_an_error_of_the_engine(runner: ModelRunner) -> None:
    item = toy_item(PICTURES[1], 3)
    for work in (EncoderWork(1, 0, 1), EncoderWork(1, 1, 1, item)):
        with pytest.raises(MediaWorkError, match="does not follow"):
            StepDriver(runner, NUM_BLOCKS).step({}, encoder_work=[work])
    driver = StepDriver(runner, NUM_BLOCKS)
    driver.add("one", prompt_of([item], 10), GREEDY, media=((1, item),))
    with pytest.raises(MediaWorkError, match="item 1"):
        driver.step({"one": 10})


def test_what_a_model_takes_is_in_its_spec(loaded: ModelRunner, folder: Path) -> None:
    media = loaded.kv_cache_spec().media
    assert media is not None
    assert (media.vector_size, dict(media.num_layers)) == (SIZE, {"image": 3, "embeds": 0})
    assert (media.is_atomic, dict(media.max_num_tokens)) == (False, {"image": 24, "embeds": 256})
    without = load(folder, enable_prompt_embeds=False).kv_cache_spec().media
    assert without is not None
    assert dict(without.num_layers) == {"image": 3}


def test_the_memory_of_items_is_not_given_to_the_kv_cache(
    loaded: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 1 << 34)
    larger = load(folder, encoder_cache_tokens=1 << 20)
    for is_size_given, share in ((True, 1.0), (False, 0.4)):
        room = loaded.available_kv_bytes(is_size_given=is_size_given)
        lost = room - larger.available_kv_bytes(is_size_given=is_size_given)
        needed = ((1 << 20) - 2048) * SIZE * 4  # the default is what a step has
        assert lost == pytest.approx(share * needed, rel=1e-6) or (not is_size_given and lost == 0)
