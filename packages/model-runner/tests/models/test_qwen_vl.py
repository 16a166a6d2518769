"""What Qwen-VL refuses of a configuration, and the order of its sections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES

from llmstack_media import Clip, Piece
from llmstack_model_runner.encoders.image_encoder import num_places
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.weights import read_served_config
from llmstack_types import ModelRunnerConfig


def make(folder: Path, name: str, vision: dict[str, Any], text: dict[str, Any]) -> Any:
    family = FAMILIES[name]
    model_type = name.replace(" vl", "_vl").replace(" ", "")
    config: Any = {"architectures": [family.name], "model_type": model_type, **family.config}
    config["vision_config"] = config["vision_config"] | vision
    if "text_config" in config:
        config["text_config"] = config["text_config"] | text
    else:
        config |= text
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    served, _, _ = read_served_config(ModelRunnerConfig(str(folder), max_model_len=512))
    return make_model(served["architectures"][0], "auto", (served, torch.float32, torch.device("cpu")), Sharding())


@pytest.mark.parametrize(
    ("name", "vision", "text", "message"),
    [
        ("qwen 3 vl", {"deepstack_visual_indexes": [0, 3]}, {}, "must be numbers of its layers"),
        ("qwen 3 vl", {"deepstack_visual_indexes": [1, 0]}, {}, "must ascend"),
        ("qwen 3 vl", {"deepstack_visual_indexes": 3}, {}, "must be numbers of its layers"),
        ("qwen 3 vl", {"num_position_embeddings": 24}, {}, "24 is no square"),
        ("qwen 3 vl", {}, {"num_hidden_layers": 2}, "has 2, which are too few"),
        ("qwen 3 vl", {}, {"rope_scaling": {"mrope_section": [3, 3]}}, "three sizes with the sum 8"),
        ("qwen 3 vl", {"patch_size": 16}, {}, "do not fit the encoder"),
        ("qwen 2 vl", {"num_heads": 3}, {}, "3 heads do not divide 32 into fours"),
        ("qwen 2 vl", {}, {"rope_scaling": {"mrope_section": [1, 1, 2], "mrope_interleaved": True}}, "is not this"),
    ],
)
def test_what_no_encoder_has_is_refused_by_name(
    tmp_path: Path, name: str, vision: dict[str, Any], text: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, name, vision, text)


def test_sections_are_in_turns_until_one_ends(tmp_path: Path) -> None:
    text = {"rope_scaling": {"mrope_section": [4, 3, 1]}}
    model = make(tmp_path, "qwen 3 vl", {}, text)
    assert model._axes.tolist() == 2 * [0, 1, 2, 0, 1, 0, 0, 1]
    model = make(tmp_path, "qwen 2 vl", {}, {"rope_scaling": {"mrope_section": [1, 1, 2], "type": "mrope"}})
    assert model._axes.tolist() == 2 * [0, 1, 2, 2]


def test_a_time_counts_as_text() -> None:
    pieces = (Piece("<383.5 seconds><|vision_start|>"), Piece("<|video_pad|>", 4), Piece("<|vision_end|>"))
    assert num_places(pieces) == len("<383.5 seconds>") + 1 + 4 + 1


def test_the_largest_item_has_room_for_every_time() -> None:
    ours = FAMILIES["qwen 3 vl"].ours_of_videos()
    most = num_places(ours.placeholders(ours.largest()))
    for num_frames in (2, 7, 40, 60):
        layout = ours.layout(Clip(num_frames, 4.0 * num_frames, 56, 56))
        assert num_places(ours.placeholders(layout)) <= most
