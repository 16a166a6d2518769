"""Videos are chosen, sized, cut and written into prompts as in transformers, whose classes need torchvision to run."""

from __future__ import annotations

import importlib
import io
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from media_helpers.pictures import noise
from media_helpers.torchvision_names import let_torchvision_be_imported
from PIL import Image

from llmstack_media import Clip, ProcessorConfigError, VideoProcessor, processors, text_of
from llmstack_media.decode.clips import decode_frames, join_frames, read_clip
from llmstack_media.limits import MediaLimits
from llmstack_types import InvalidRequestError

torch = pytest.importorskip("torch")
HAS_TORCHVISION = let_torchvision_be_imported()
pytest.importorskip("transformers")
IMAGE = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 28 * 28 * 6000}
SIZE = {"shortest_edge": 4096, "longest_edge": 32 * 32 * 4000}


def ours(model_type: str, video: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Any:
    files = {"preprocessor": IMAGE, "model": {"model_type": model_type, "vision_config": vision or {}}}
    return processors(**files, video_preprocessor=video).video


@pytest.fixture(scope="module")
def qwen3() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")


def clips(seed: int, count: int) -> list[Clip]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(16, 900, (count, 2)).tolist()
    return [Clip(int(rng.integers(1, 200)), float(rng.integers(1, 400)) / 10, width, height) for width, height in sizes]


def test_frames_and_sizes_are_those_of_qwen_3(qwen3: Any) -> None:
    made = ours("qwen3_vl", {"size": SIZE})
    defaults = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    num_refused = 0
    for clip in clips(0, 200):
        rate = clip.num_frames / clip.seconds
        metadata = SimpleNamespace(total_num_frames=clip.num_frames, fps=rate)
        indices = qwen3.Qwen3VLVideoProcessor.sample_frames(defaults, metadata)
        if len(indices) < 2:
            continue  # where the reference fails
        sides = qwen3.smart_resize(
            len(indices), clip.height, clip.width, 2, 32, SIZE["shortest_edge"], SIZE["longest_edge"]
        )
        expected = (-(-len(indices) // 2), sides[0] // 16, sides[1] // 16)
        try:
            layout = made.layout(clip)
        except InvalidRequestError:
            assert np.prod(expected) // 4 > made.max_vectors
            num_refused += 1
            continue
        assert (layout.frames, layout.grid) == (tuple(indices), expected)
        again = made.with_options({"num_frames": 6}).layout(clip._replace(num_frames=60))
        assert len(again.frames) <= 6
    assert num_refused < 100


def test_frames_and_sizes_are_those_of_qwen_2() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smart_resize = importlib.import_module(
            "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
        ).smart_resize
    video = {"do_sample_frames": True, "fps": 2, "min_pixels": 3136, "max_pixels": 28 * 28 * 40}
    made = ours("qwen2_vl", video)
    for clip in clips(1, 200):
        total, rate = clip.num_frames, clip.num_frames / clip.seconds
        count = min(max(total / rate * 2, 4), min(768, total) // 2 * 2, total) // 2 * 2
        layout = made.layout(clip)
        if count:
            assert list(layout.frames) == torch.arange(0, total, total / count).int().tolist()
        height, width = smart_resize(clip.height, clip.width, 28, 3136, 28 * 28 * 40)
        assert layout.grid == (-(-len(layout.frames) // 2), height // 14, width // 14)


def test_without_a_rate_few_frames_of_an_animation_and_all_of_a_list_are_taken() -> None:
    made = ours("qwen2_vl", {"max_pixels": 28 * 28 * 8, "min_pixels": 3136})
    whole, some = made.layout(Clip(31, 3.1, 60, 60)), made.layout(Clip(320, 32, 60, 60))
    assert (len(whole.frames), some.frames) == (31, tuple(range(0, 320, 10)))
    assert len(made.layout(Clip(100, 0.0, 60, 60)).frames) == 100
    assert len(made.with_options({"num_frames": 8}).layout(Clip(100, 0.0, 60, 60)).frames) == 8


def test_patches_are_those_of_the_reference(qwen3: Any) -> None:
    frames = np.stack([noise(np.random.default_rng(number), 64, 96) for number in range(5)])
    made = ours("qwen3_vl", {"size": {"shortest_edge": 1024, "longest_edge": 64 * 96 * 6}})
    layout = made.layout(Clip(5, 2.5, 64, 96))
    array = made.prepare(frames, layout)
    videos = torch.from_numpy(frames).permute(0, 3, 1, 2)[None]
    patches, *grid = qwen3.Qwen3VLVideoProcessor.patchify(None, videos, 16, 2, 2)
    assert tuple(grid) == layout.grid
    assert np.array_equal(array.reshape(len(array), -1), patches[0].numpy())


def test_the_text_is_that_of_the_reference() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composite = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    made = ours("qwen3_vl", {"size": SIZE})
    for clip in clips(2, 20):
        layout = made.layout(clip._replace(width=64, height=64))
        stand_in = SimpleNamespace(
            video_token="<|video_pad|>", vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>",
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            _calculate_timestamps=lambda *values: composite._calculate_timestamps(None, *values),
        )  # fmt: skip
        metadata = SimpleNamespace(fps=clip.num_frames / clip.seconds, frames_indices=np.array(layout.frames))
        inputs = {"video_grid_thw": torch.tensor([layout.grid]), "video_metadata": [metadata]}
        assert text_of(made.placeholders(layout)) == composite.replace_video_token(stand_in, inputs, 0)


def test_times_of_qwen_2_5_are_the_bits_of_a_number() -> None:
    video = {"min_pixels": 3136, "max_pixels": 28 * 28 * 40}
    made = ours("qwen2_5_vl", video, {"tokens_per_second": 2})
    *_, bits = made.layout(Clip(10, 2.5, 64, 64)).grid
    assert np.uint32(bits).view(np.float32) == np.float32(2) * np.float32(2 / 4)
    assert len(ours("qwen2_vl", video).layout(Clip(10, 2.5, 64, 64)).grid) == 3
    with pytest.raises(InvalidRequestError, match="too slowly"):
        made.layout(Clip(4, 1000.0, 64, 64))
    assert len(made.largest().grid) == 4
    with pytest.raises(InvalidRequestError, match="lasts longer than 99999 seconds"):
        ours("qwen3_vl", {"size": SIZE}).layout(Clip(4, 2e5, 64, 64))


def test_vectors_of_llava_onevision_are_counted_as_in_the_reference() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composite = importlib.import_module("transformers.models.llava_onevision.processing_llava_onevision")
    options = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 70, "width": 70}}
    model = {"model_type": "llava_onevision", "vision_config": {"patch_size": 14}}
    made = processors(
        options, {"num_image_tokens": 25}, model=model, video_preprocessor={"size": options["size"]}
    ).video
    assert made is not None
    stand_in = SimpleNamespace(num_image_tokens=25, video_token="<video>")
    for clip in (Clip(1, 1.0, 30, 40), Clip(7, 2.0, 64, 300), Clip(20, 0.0, 64, 64), Clip(200, 9.0, 64, 64)):
        layout = made.layout(clip)
        assert len(layout.frames) == min(clip.num_frames, 32)
        frames = np.stack([noise(np.random.default_rng(1), clip.width, clip.height)] * len(layout.frames))
        array = made.prepare(frames, layout)
        assert array.shape == layout.shape == (len(layout.frames), 3, 70, 70)
        text = composite.LlavaOnevisionProcessor.replace_video_token(stand_in, {"pixel_values_videos": [array]}, 0)
        assert text_of(made.placeholders(layout)) == text
    assert "becomes " in refused(lambda: made.with_options({"num_frames": 700}).layout(Clip(700, 0.0, 64, 64)))
    assert made.largest().num_vectors <= made.max_vectors


def refused(work: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        work()
    return caught.value.message


def test_a_video_has_at_most_as_many_vectors_as_the_largest_picture() -> None:
    small = {**IMAGE, "min_pixels": 3136, "max_pixels": 28 * 28 * 20}
    made = processors(small, model={"model_type": "qwen2_vl"}).video
    assert made is not None
    assert made.layout(Clip(2, 1.0, 112, 112)).num_vectors == 16
    assert "becomes 80 tokens, and may become" in refused(lambda: made.layout(Clip(10, 1.0, 112, 112)))
    assert made.with_options({"num_frames": 2}).layout(Clip(4, 1.0, 112, 112)).num_vectors == 16
    assert made.largest().num_vectors >= made.max_vectors
    for options in ({"num_frames": 0}, {"fps": "2"}, {"size": 3}, {"max_pixels": 1}):
        refused(lambda options=options: made.with_options(options))


def test_which_checkpoints_take_videos() -> None:
    assert processors({**IMAGE}, model={"model_type": "llava"}).video is None
    assert processors(processor={"image_processor": IMAGE}, model={"model_type": "qwen3_vl"}).video is None
    nested = {"image_processor": IMAGE, "video_processor": {"size": SIZE, "num_frames": 5}}
    made = processors(processor=nested, model={"model_type": "qwen3_vl"}).video
    assert made is not None
    assert (made.num_frames, made.fps) == (5, 0)
    for wrong in (
        {"size": 3},
        {"do_sample_frames": True, "fps": 0},
        {"do_resize": False},
        {"min_frames": 0},
        {"max_pixels": 1},
    ):
        with pytest.raises(ProcessorConfigError):
            ours("qwen2_vl", wrong)


def animated(frames: np.ndarray) -> bytes:
    pictures, file = [Image.fromarray(frame) for frame in frames], io.BytesIO()
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:], duration=100, lossless=True)
    return file.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_values_are_near_those_of_torchvision(model_type: str) -> None:
    """Both resize by the same kernel, and round at other places: two steps of a byte at most, in 1 % of all values."""
    if not HAS_TORCHVISION:
        pytest.skip("torchvision is not installed")
    name = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[model_type]
    reference_class = getattr(
        importlib.import_module(f"transformers.models.{model_type}.video_processing_{model_type}"), name
    )
    frames = np.stack([noise(np.random.default_rng(number), 333, 217) for number in range(5)])
    data, limits = animated(frames), MediaLimits()
    made: VideoProcessor = ours(model_type, {"size": SIZE})
    layout = made.layout(read_clip(data, limits))
    array = made.prepare(decode_frames(data, layout.frames, limits), layout)
    metadata = [{"total_num_frames": 5, "fps": 10.0, "duration": 0.5}]
    reference = reference_class(size=SIZE, do_normalize=False, do_rescale=False)
    outputs = reference(
        [frames], video_metadata=metadata, do_sample_frames=model_type == "qwen3_vl", return_tensors="pt"
    )
    assert outputs["video_grid_thw"][0].tolist() == list(layout.grid)
    difference = np.abs(outputs["pixel_values_videos"].int().numpy() - array.reshape(len(array), -1))
    assert difference.max() <= 2
    assert (difference > 0).mean() <= 0.02


def test_a_list_of_pictures_is_a_video() -> None:
    files = [animated(noise(np.random.default_rng(number), 20, 30)[None]) for number in range(3)]
    data, limits = join_frames(files), MediaLimits()
    assert read_clip(data, limits) == (3, 0.0, 20, 30)
    first, last = decode_frames(data, (0, 2), limits)
    assert np.array_equal(last, noise(np.random.default_rng(2), 20, 30))
    assert not np.array_equal(first, last)
    other = animated(noise(np.random.default_rng(0), 30, 20)[None])
    assert "different sizes" in refused(lambda: read_clip(join_frames([*files, other]), limits))
    assert "no frames" in refused(lambda: read_clip(join_frames([]), limits))
    assert "allowed format" in refused(lambda: read_clip(join_frames([*files, b""]), limits))
    assert "more than the 2 frames" in refused(lambda: read_clip(data, MediaLimits(max_video_frames=2)))
    assert "3 frames of 20 × 30" in refused(lambda: read_clip(data, MediaLimits(max_video_pixels=1799)))
