"""Encoders of transformers: layers that run some at a time, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from model_runner_helpers.backend_picture_families import BACKEND_FAMILIES
from model_runner_helpers.picture_families import prepare, prepare_video
from model_runner_helpers.picture_prompts import (
    Prompt,
    expected,
    generate,
    load_model,
    load_runner,
    logits_in_chunks,
    vectors_of,
)

from llmstack_model_runner.architectures import BACKEND_TOWERS, encoder_of
from llmstack_model_runner.models.transformers_backend.paused_layers import PausedLayers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Tower(nn.Module):
    """Layers with something before, between and behind them. `order` is the one in which they are called."""

    def __init__(self, order: tuple[int, ...], gives_tuples: bool = False, *, adds_in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adds_in_place = adds_in_place
        self.layers = nn.ModuleList([Layer(gives_tuples) for _ in range(4)])
        self.order = order
        self.behind = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        states = [values * 2]
        for index in self.order:
            output = self.layers[index](states[-1] + 1)
            states.append(output[0] if isinstance(output, tuple) else output)
            if self.adds_in_place:
                states[-1] += 1
        return self.behind[0](states[-1] + states[-3])


class Layer(nn.Module):
    def __init__(self, gives_tuples: bool) -> None:
        super().__init__()
        self.linear, self.gives_tuples, self.num_calls = nn.Linear(3, 3), gives_tuples, 0

    def forward(self, values: torch.Tensor) -> Any:
        self.num_calls += 1
        return (self.linear(values),) if self.gives_tuples else self.linear(values)


@pytest.mark.parametrize("adds_in_place", [False, True])
@pytest.mark.parametrize("part", [1, 3, 4])
def test_layers_in_parts_give_what_a_whole_call_gives_and_run_once(part: int, adds_in_place: bool) -> None:
    tower, values = Tower((0, 1, 2, 3), adds_in_place=adds_in_place), torch.ones(2, 3)
    with torch.inference_mode():
        whole = tower(values)
        layers = PausedLayers(tower)
        assert torch.equal(layers.try_out(lambda: tower(values)), whole)
        assert (layers.depth, layers.are_paused) == (4, True)
        before, known = [layer.num_calls for layer in tower.layers], []
        for first in range(0, 4, part):
            known = layers.run(lambda: tower(values), known, min(first + part, 4))
        assert torch.equal(layers.finish(lambda: tower(values), known), whole)
        assert [layer.num_calls for layer in tower.layers] == [count + 1 for count in before]
        assert torch.equal(tower(values), whole)  # nothing of a part stays behind it


@pytest.mark.parametrize("tower", [Tower((0, 2, 1, 3)), Tower((0, 1, 1, 2, 3)), Tower((0, 1, 2)),
                                   Tower((0, 1, 2, 3), gives_tuples=True)])  # fmt: skip
def test_layers_that_are_called_otherwise_run_as_a_whole(tower: Tower) -> None:
    with torch.inference_mode():
        values = torch.ones(2, 3)
        whole = tower(values)
        layers = PausedLayers(tower)
        layers.try_out(lambda: tower(values))
        assert not layers.are_paused
        assert layers.run(lambda: tower(values), [], 2) == []
        assert torch.equal(layers.finish(lambda: tower(values), []), whole)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BACKEND_FAMILIES["vip llava"].write(tmp_path)
    return tmp_path


def changed(folder: Path, name: str, **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_processor_that_does_not_fit_the_tower_is_refused_in_a_sentence(folder: Path) -> None:
    changed(folder, "preprocessor_config.json", size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    with pytest.raises(ValueError, match="does not run on the transformers backend: encoding a picture raises"):
        load_model(folder)
    changed(folder, "preprocessor_config.json", size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42})
    changed(folder, "processor_config.json", num_additional_image_tokens=3)
    with pytest.raises(ValueError, match=r"a picture has \[9, 32\] numbers instead of \[11, 32\]"):
        load_model(folder)
    changed(folder, "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor", size=None)
    with pytest.raises(ValueError, match="pictures of Qwen2VLImageProcessor do not reach its encoder"):
        load_model(folder)


def test_a_tower_that_no_code_runs_leaves_the_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    changed(folder, "config.json", vision_config={**vision, "model_type": "timm_wrapper"})
    with caplog.at_level(logging.WARNING):
        assert load_model(folder).media_encoder() is None
    assert "VipLlavaForConditionalGeneration takes no pictures here: its tower timm_wrapper" in caplog.text
    changed(folder, "config.json", vision_config=vision)
    with caplog.at_level(logging.WARNING):
        assert load_model(folder, model_impl="llmstack").media_encoder() is None
    assert "which model_impl llmstack leaves out" in caplog.text


def test_every_class_and_tower_of_the_table_is_tested() -> None:
    tested = {(family.name, family.config["vision_config"]["model_type"]) for family in BACKEND_FAMILIES.values()}
    assert tested == {(name, tower) for name, towers in BACKEND_TOWERS.items() for tower in towers}
    for name in BACKEND_TOWERS:
        assert encoder_of({"architectures": [name]}) is not None


def test_frames_of_a_video_are_encoded_together_beside_pictures(tmp_path: Path) -> None:
    family = BACKEND_FAMILIES["llava onevision"]
    reference = family.write(tmp_path)
    video = prepare_video(family.ours_of_videos(), (70, 50), 3, 1.0, 5)
    picture = prepare(family.ours(), (30, 95), 1)
    tokens = [3, 10, 17]
    items = []
    for one in (picture, video):
        items.append(replace(one.item, offset=len(tokens) + one.item.offset))
        tokens += [*one.tokens, 5, 7]
    inputs = family.inputs([picture.values], [picture.item.layout]) | {"pixel_values_videos": video.values[None]}
    prompt = Prompt(tokens, tuple(items), inputs, family)
    outputs, logits = expected(reference, prompt)
    model = load_model(tmp_path)
    for size in (1000, 23):
        found = logits_in_chunks(model, tokens + outputs[:-1], prompt.items, size)
        assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))
    assert torch.equal(vectors_of(model, items[1], 1), vectors_of(model, items[1]))
    assert generate(load_runner(tmp_path), prompt, 23) == outputs
