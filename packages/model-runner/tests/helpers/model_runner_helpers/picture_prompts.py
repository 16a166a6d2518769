"""Prompts with pictures, videos and sounds, computed by models and runners in every way, and by transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.layers.step_vectors import Block, StepVectors
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.testing import StepDriver
from llmstack_model_runner.toy_vision import places_of
from llmstack_model_runner.weights import load_weights, read_served_config
from llmstack_types import EncoderWork, MediaItem, ModelRunnerConfig, SamplingParams
from llmstack_types.media import num_slices
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.picture_families import PictureFamily

NUM_BLOCKS, NUM_STATE_BLOCKS, NUM_OUTPUTS = 800, 20, 16
GREEDY = SamplingParams(temperature=0.0)


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
    """A prompt with an item for each seed, and text before, between and behind."""
    tokens = [(7 * place + 3) % 50 for place in range(num_before)]
    items, values, layouts = [], [], []
    for seed in seeds:
        picture = family.item(seed)
        items.append(replace(picture.item, offset=len(tokens) + picture.item.offset))
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
    return tokens[len(prompt.tokens) :], logits * prompt.family.logit_scale


def load_model(folder: Path, **overrides: Any) -> CausalLM:
    config, checkpoint_format, _ = read_served_config(ModelRunnerConfig(str(folder), max_model_len=512, **overrides))
    model = make_model(config["architectures"][0], "auto", (config, torch.float32, torch.device("cpu")), Sharding())
    load_weights(model, folder, checkpoint_format=checkpoint_format)
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
    total = encoder.num_layers[item.kind] * num_slices(item.num_units, encoder.slice_units)
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
        first, *deep = vectors[own].split(model.item_size, dim=1)
        given = StepVectors(places[own] - start, first, blocks, axes, tuple(deep)) if own.any() else None
        found.append(harness.step([("a", tokens[start:end])], given, shift=shift[start:end]))
    return torch.cat(found)


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
