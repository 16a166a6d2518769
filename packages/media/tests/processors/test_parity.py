"""Every processor equals transformers' class that uses Pillow: bytes, values, counts and text."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from typing import Any

import numpy as np
import pytest
from media_helpers.pictures import as_file, noise, orientation, picture
from media_helpers.references import FAMILIES, Family, as_reference, normalized
from PIL import Image, ImageOps

from llmstack_media.decode.pictures import decode_image
from llmstack_media.limits import MediaLimits
from llmstack_media.processors.checkpoints import image_processor
from llmstack_media.processors.layout import text_of

NUM_PICTURES = 200
NUM_PICTURES_AT_ONCE = 24
"""Of each family in the quick tests; `make test-full` compares all, and the quick ones do of one family."""
MODES = ("RGB", "RGB", "L", "P", "RGBA", "LA", "1", "CMYK")


def reference_outputs(family: Family, image: Image.Image, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return family.reference()(image, return_tensors="np", **family.call, **options)


def sizes(rng: np.random.Generator) -> tuple[int, int]:
    """Square and long, tiny and large, even and odd."""
    width, height = (int(np.exp(rng.uniform(np.log(8), np.log(320)))) for _ in range(2))
    return (width, height) if rng.random() < 0.9 else (width, width)


def amounts() -> list[Any]:
    quick = [(name, NUM_PICTURES if name == "idefics3" else NUM_PICTURES_AT_ONCE) for name in FAMILIES]
    whole = [pytest.param(name, NUM_PICTURES, marks=pytest.mark.full) for name in FAMILIES if name != "idefics3"]
    return [*quick, *whole]


@pytest.mark.parametrize(("name", "num_pictures"), amounts())
def test_pixels_equal_the_reference_over_sizes_modes_and_orientations(name: str, num_pictures: int) -> None:
    family, rng = FAMILIES[name], np.random.default_rng(num_pictures)
    ours = family.ours()
    layouts = set()
    for number in range(num_pictures):
        width, height = sizes(rng)
        mode = MODES[number % len(MODES)]
        kind = "JPEG" if mode == "CMYK" else "PNG"
        data = as_file(picture(rng, mode, width, height), kind, exif=orientation(1 + number % 8))
        pixels = decode_image(data, MediaLimits())
        layout = ours.layout(pixels.shape[1], pixels.shape[0])
        array = ours.prepare(pixels)
        assert array.shape == layout.shape
        assert array.dtype == np.uint8
        assert array.nbytes == layout.num_bytes
        outputs = reference_outputs(family, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        expected = np.asarray(outputs["pixel_values"])
        assert expected.dtype == np.float32
        np.testing.assert_array_equal(as_reference(ours, normalized(ours, array), outputs), expected)
        layouts.add(layout)
    assert len(layouts) > 1 or ours.layout(8, 320) == ours.layout(320, 8)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.composite])
def test_placeholders_are_the_text_of_the_reference(name: str) -> None:
    family, rng = FAMILIES[name], np.random.default_rng(3)
    ours = family.ours()
    for _ in range(40):
        width, height = sizes(rng)
        options = {"return_row_col_info": True} if "idefics3" in name else {}
        outputs = reference_outputs(family, Image.fromarray(noise(rng, width, height)), **options)
        layout = ours.layout(width, height)
        pieces = ours.placeholders(layout)
        assert text_of(pieces) == family.reference_text(outputs)
        assert sum(piece.num_vectors for piece in pieces) == layout.num_vectors
        assert all(piece.num_vectors or not following.text or following.num_vectors
                   for piece, following in itertools.pairwise(pieces))  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_no_picture_has_more_vectors_than_the_largest(name: str) -> None:
    ours, rng = FAMILIES[name].ours(), np.random.default_rng(5)
    largest = ours.largest().num_vectors
    reached = 0
    for _ in range(2000):
        height = int(np.exp(rng.uniform(0, np.log(6000))))
        ratio = np.exp(rng.uniform(-np.log(190), np.log(190)))
        width = max(1, int(height * ratio))
        if max(width, height) <= min(200 * min(width, height), 8000):
            reached = max(reached, ours.layout(width, height).num_vectors)
    assert largest / 2 < reached <= largest


@pytest.mark.parametrize("name", FAMILIES)
def test_the_nested_file_of_transformers_5_makes_the_same_processor(name: str) -> None:
    family = FAMILIES[name]
    nested = json.loads(json.dumps({**family.processor, "image_processor": family.reference().to_dict()}))
    assert nested["image_processor"]["image_processor_type"] == family.class_name
    assert image_processor({"image_processor_type": "unread"}, nested, model=family.model) == family.ours()


@pytest.mark.parametrize("changes", [
    {"do_rescale": False}, {"do_normalize": False}, {"do_rescale": False, "do_normalize": False},
    {"rescale_factor": 1 / 127.5, "image_mean": [0.1, 0.9, 0.33], "image_std": [0.7, 0.2, 1.9]},
])  # fmt: skip
def test_tables_follow_every_step_of_the_arithmetic(changes: dict[str, Any]) -> None:
    family = FAMILIES["siglip"]
    ours = family.ours(**changes)
    image = Image.fromarray(noise(np.random.default_rng(1), 60, 60))
    expected = np.asarray(family.reference(**changes)(image, return_tensors="np")["pixel_values"])
    array = ours.prepare(np.asarray(image))
    np.testing.assert_array_equal(normalized(ours, array), expected.astype(np.float32))


def test_sixteen_bits_are_scaled_where_the_reference_clips_them() -> None:
    image = picture(np.random.default_rng(2), "I;16", 60, 50)
    pixels = decode_image(as_file(image), MediaLimits())
    np.testing.assert_array_equal(pixels[..., 0], np.asarray(image) >> 8)


@pytest.mark.parametrize(("name", "placeholder", "in_text"), [
    ("idefics3", "<image>", "<image>"), ("gemma3", "<start_of_image>", "<start_of_image>"),
    ("gemma4", "<|image|>", "<|image|>"),
    ("clip", "<image>", "<image>"), ("llava-next", "<image>", "<image>"), ("pixtral", "[IMG]", "[IMG]"),
    ("qwen2-vl", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("internvl", "<IMG_CONTEXT>", "<IMG_CONTEXT>"), ("aya-vision", "<image>", "<image>"),
])  # fmt: skip
def test_a_picture_is_written_as_its_family_does(name: str, placeholder: str, in_text: str) -> None:
    ours = FAMILIES[name].ours()
    assert (ours.placeholder, ours.placeholder_in_text) == (placeholder, in_text)
