"""Processors from a checkpoint's files: what is read, what is refused in a sentence, and options of requests."""

from __future__ import annotations

from typing import Any

import pytest
from media_helpers.references import FAMILIES

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.checkpoints import PROCESSORS, image_processor, processors
from llmstack_media.processors.idefics3 import Idefics3ImageProcessor
from llmstack_types import InvalidRequestError

MODEL = {"vision_config": {"patch_size": 14}}


@pytest.mark.parametrize("ending", ["", "Fast", "Pil"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_class_is_known_by_all_of_its_names(name: str, ending: str) -> None:
    image = {"image_processor_type": f"{name}{ending}"}
    if name == "LlavaNextImageProcessor":
        image |= {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}  # type: ignore[dict-item]
    assert image_processor(image, model=MODEL).name == name


def test_older_names_and_forms_of_files_are_read() -> None:
    older = image_processor({"feature_extractor_type": "CLIPFeatureExtractor", "size": 336, "crop_size": 336},
                            {"patch_size": 14}, model=MODEL)  # fmt: skip
    newer = image_processor({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
                             "crop_size": {"height": 336, "width": 336}}, {"patch_size": 14}, model=MODEL)  # fmt: skip
    assert older == newer
    qwen = image_processor({"image_processor_type": "Qwen2_5_VLImageProcessor", "min_pixels": 3136, "max_pixels": 4000})
    assert (qwen.min_pixels, qwen.max_pixels) == (3136, 4000)  # type: ignore[attr-defined]


def test_tokens_come_from_the_tokenizer_where_it_names_them() -> None:
    image = {"image_processor_type": "Gemma3ImageProcessor"}
    for tokenizer in ({"boi_token": "<b>"}, {"extra_special_tokens": {"boi_token": "<b>"}},
                      {"boi_token": {"content": "<b>", "special": True}}):  # fmt: skip
        assert image_processor(image, None, tokenizer, MODEL).placeholder == "<b>"


REFUSED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "another class": {"image_processor_type": "ViTImageProcessor"},
    "no resizing": {"image_processor_type": "Idefics3ImageProcessor", "do_resize": False},
    "a crop": {"image_processor_type": "SiglipImageProcessor", "do_center_crop": True},
    "no crop": {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False},
    "an unknown size": {"image_processor_type": "Idefics3ImageProcessor", "size": {"height": 3, "width": 3}},
    "no size": {"image_processor_type": "SiglipImageProcessor", "size": "large"},
    "a negative size": {"image_processor_type": "SiglipImageProcessor", "size": {"height": -3, "width": 3}},
    "a huge size": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 10**6, "width": 3}},
    "a text": {"image_processor_type": "SiglipImageProcessor", "do_rescale": "yes"},
    "two means": {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.5, 0.5]},
    "no deviation": {"image_processor_type": "SiglipImageProcessor", "rescale_factor": 0},
    "a filter": {"image_processor_type": "SiglipImageProcessor", "resample": 9},
    "min over max": {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 10, "max_pixels": 5},
    "grids": {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[225, 224]]},
    "patches": {"image_processor_type": "GotOcr2ImageProcessor", "min_patches": 4, "max_patches": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ProcessorConfigError) as caught:
        image_processor(REFUSED[name], model=MODEL)
    assert 10 < len(str(caught.value)) < 400


def test_an_encoder_without_a_patch_size_is_refused() -> None:
    with pytest.raises(ProcessorConfigError):
        image_processor({"image_processor_type": "SiglipImageProcessor"})


OPTIONS: list[tuple[str, dict[str, Any], bool]] = [
    ("idefics3", {"longest_edge": 64}, True), ("idefics3", {"longest_edge": 4096}, False),
    ("idefics3", {"crop_size": 64}, False), ("idefics3", {"longest_edge": True}, False),
    ("qwen2-vl", {"max_pixels": 28 * 28 * 8}, True), ("qwen2-vl", {"max_pixels": 1e9}, False),
    ("qwen2-vl", {"max_pixels": 10}, False), ("qwen2-vl", {"max_pixels": 10**9}, False),
    ("gemma3", {"do_pan_and_scan": False}, True), ("gemma3", {"do_pan_and_scan": True}, False),
    ("gemma3-pan-and-scan", {"pan_and_scan_max_num_crops": 2}, True),
    ("internvl", {"max_patches": 3}, True), ("internvl", {"min_patches": 5, "max_patches": 3}, False),
    ("internvl", {"max_patches": 40}, False), ("pixtral", {"max_height": 56, "max_width": 56}, True),
    ("clip", {"size": 3}, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "is_allowed"), OPTIONS)
def test_options_of_a_request_only_lower_its_cost(name: str, options: dict[str, Any], is_allowed: bool) -> None:
    ours = FAMILIES[name].ours()
    if is_allowed:
        changed = ours.with_options(options)
        assert changed.largest().num_vectors <= ours.largest().num_vectors
        assert (changed.identity() == ours.identity()) == (changed == ours)
        return
    with pytest.raises(InvalidRequestError) as caught:
        ours.with_options(options)
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize("name", FAMILIES)
def test_low_detail_costs_no_more(name: str) -> None:
    ours = FAMILIES[name].ours()
    assert ours.for_detail("low").largest().num_vectors <= ours.largest().num_vectors
    assert ours.for_detail("high") == ours.for_detail("auto") == ours
    if isinstance(ours, Idefics3ImageProcessor):
        assert ours.for_detail("low").layout(300, 200).grid == (1, 0, 0)


def test_a_model_of_sound_takes_no_pictures() -> None:
    files = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
    found = processors(files, model={"model_type": "qwen2_audio"})
    assert (found.image, found.video) == (None, None)
    assert found.audio is not None
    assert (found.audio.sample_rate, found.audio.max_s, found.audio.largest().num_vectors) == (16_000, 30.0, 750)
    nested = processors(None, {"feature_extractor": files, "audio_token": "<a>"}, model={"model_type": "qwen2_audio"})
    assert nested.audio is not None
    assert nested.audio.placeholder == "<a>"
    assert nested.audio.placeholder_in_text == "Audio {number}: <|audio_bos|><a><|audio_eos|>"
    with pytest.raises(ProcessorConfigError, match="takes no pictures"):
        _ = found.pictures
    with pytest.raises(ProcessorConfigError, match="is not WhisperFeatureExtractor"):
        processors({"feature_extractor_type": "Other"}, model={"model_type": "qwen2_audio"})


def test_windows_and_kinds_of_models_of_sound() -> None:
    files = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
    voxtral = processors(files, model={"model_type": "voxtral"}).audio
    assert voxtral is not None
    found = [(one.grid, one.num_units, one.num_vectors) for one in map(voxtral.layout, (1, 480_000, 480_001))]
    assert found == [((3000,), 1500, 375), ((3000,), 1500, 375), ((6000,), 3000, 750)]
    both = {**files, "image_processor_type": "Qwen2VLImageProcessor", "chunk_length": 300}
    omni = processors(both, tokenizer={"extra_special_tokens": {"image_token": "<|IMAGE|>"}},
                      model={"model_type": "qwen2_5_omni"})  # fmt: skip
    assert omni.pictures.placeholder == "<|IMAGE|>"
    assert omni.audio is not None
    assert (omni.video, omni.audio.max_s, omni.audio.placeholder) == (None, 300.0, "<|AUDIO|>")
    layout = omni.audio.layout(16_000 * 3)
    assert (layout.grid, layout.num_units, layout.num_vectors) == ((300,), 150, 75)
