"""The image processors of transformers, with checkpoints of each family to make ours from."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about its own optional parts
    from transformers.processing_utils import ProcessorMixin

from llmstack_media.processors.checkpoints import image_processor
from llmstack_media.processors.processor import ImageProcessor


@dataclass(frozen=True)
class Family:
    """A checkpoint by its files, and the classes of transformers that read it."""

    module: str
    class_name: str
    image: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)
    patch_size: int = 14
    """Of the encoder."""
    composite: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Of the composite processor, which needs torchvision to be made."""
    call: dict[str, Any] = field(default_factory=dict)
    """What the composite processor gives to the image processor."""
    model_type: str = ""

    @property
    def model(self) -> dict[str, Any]:
        """`config.json`."""
        return {"vision_config": {"patch_size": self.patch_size}, "model_type": self.model_type}

    def ours(self, **changes: Any) -> ImageProcessor:
        image = {"image_processor_type": self.class_name, **self.image, **changes}
        return image_processor(image, self.processor, model=self.model)

    def reference(self, **changes: Any) -> Any:
        module = importlib.import_module(f"transformers.models.{self.module}.image_processing_pil_{self.module}")
        return getattr(module, f"{self.class_name}Pil")(**{**self.image, **changes})

    def reference_text(self, outputs: Mapping[str, Any]) -> str:
        """What the composite processor writes into a prompt for the picture."""
        if self.composite == "by hand":  # whose module needs torchvision to be imported
            side = self.attributes["patch_size"] * self.attributes["spatial_merge_size"]
            rows, columns = (length // side for length in outputs["image_sizes"][0])
            return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"
        package, name = self.composite.split(":")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            composite = getattr(importlib.import_module(f"transformers.models.{package}"), name)
        assert issubclass(composite, ProcessorMixin)
        stand_in = SimpleNamespace(**self.attributes, image_processor=self.reference())
        for method in ("_get_number_of_features", "_get_unpadded_features"):
            if hasattr(composite, method):
                setattr(stand_in, method, getattr(composite, method).__get__(stand_in))
        return composite.replace_image_token(stand_in, outputs, 0)


IDEFICS3 = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
SEQUENCE = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
_LLAVA = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
FAMILIES = {
    "idefics3": Family(
        "idefics3", "Idefics3ImageProcessor", IDEFICS3, {"image_seq_len": 4}, 8,
        "idefics3.processing_idefics3:Idefics3Processor",
        {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>", "image_token": "<image>",
         "image_seq_len": 4},
    ),
    "smolvlm": Family("smolvlm", "SmolVLMImageProcessor", IDEFICS3, {"image_seq_len": 4}, 8),
    "idefics3-whole": Family(
        "idefics3", "Idefics3ImageProcessor", {**IDEFICS3, "do_image_splitting": False}, {"image_seq_len": 4}, 8,
    ),
    "siglip": Family("siglip", "SiglipImageProcessor", {"size": {"height": 56, "width": 42}}),
    "gemma3": Family(
        "gemma3", "Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}, {"image_seq_length": 4}, 14,
        "gemma3.processing_gemma3:Gemma3Processor", {"full_image_sequence": SEQUENCE},
    ),
    "gemma3-pan-and-scan": Family(
        "gemma3", "Gemma3ImageProcessor",
        {"size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 24,
         "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
        {"image_seq_length": 4}, 14, "gemma3.processing_gemma3:Gemma3Processor", {"full_image_sequence": SEQUENCE},
    ),
    "gemma4": Family(
        "gemma4", "Gemma4ImageProcessor", {"patch_size": 6, "pooling_kernel_size": 2, "max_soft_tokens": 70}, {}, 6,
        "gemma4.processing_gemma4:Gemma4Processor",
        {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    ),
    "clip": Family(
        "clip", "CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}, _LLAVA,
        14, "llava.processing_llava:LlavaProcessor", {"image_token": "<image>", **_LLAVA},
    ),
    "clip-odd": Family(
        "clip", "CLIPImageProcessor", {"size": {"shortest_edge": 43}, "crop_size": {"height": 57, "width": 42}}, _LLAVA,
    ),
    "llava": Family(
        "llava", "LlavaImageProcessor",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_pad": True}, _LLAVA,
    ),
    "llava-next": Family(
        "llava_next", "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]},
        _LLAVA, 14, "llava_next.processing_llava_next:LlavaNextProcessor", {"image_token": "<image>", **_LLAVA},
    ),
    "qwen2-vl": Family(
        "qwen2_vl", "Qwen2VLImageProcessor", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}}, {}, 14,
        "qwen2_5_vl.processing_qwen2_5_vl:Qwen2_5_VLProcessor", {"image_token": "<|image_pad|>"},
    ),
    "qwen3-vl": Family(
        "qwen2_vl", "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40}, "patch_size": 16,
         "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        {}, 16, "qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor", {"image_token": "<|image_pad|>"},
    ),
    "pixtral": Family(
        "pixtral", "PixtralImageProcessor", {"size": {"longest_edge": 168}},
        {"patch_size": 14, "spatial_merge_size": 2}, 14, "by hand", {"patch_size": 14, "spatial_merge_size": 2},
        {"patch_size": 28},
    ),
    "internvl": Family(
        "got_ocr2", "GotOcr2ImageProcessor",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
        {"image_seq_length": 4}, 14, "internvl.processing_internvl:InternVLProcessor",
        {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>",
         "image_seq_length": 4},
    ),
    "aya-vision": Family(
        "got_ocr2", "GotOcr2ImageProcessor",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
        {"img_size": 56, "patch_size": 14, "downsample_factor": 2}, 14,
        "aya_vision.processing_aya_vision:AyaVisionProcessor",
        {"img_size": 56, "patch_size": 28, "start_of_img_token": "<|START_OF_IMG|>", "tile_token": "TILE",
         "tile_global_token": "TILE_GLOBAL", "img_patch_token": "<|IMG_PATCH|>", "end_of_img_token": "<|END_OF_IMG|>"},
        model_type="aya_vision",
    ),
    "llava-onevision": Family(
        "llava_onevision", "LlavaOnevisionImageProcessor",
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in (1, 2, 3)
                                                                       for columns in (1, 2, 3)]},
        {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2", "vision_feature_select_strategy": "full"}, 14,
        "llava_onevision.processing_llava_onevision:LlavaOnevisionProcessor",
        {"image_token": "<image>", "num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2",
         "vision_feature_select_strategy": "full"},
    ),
    "lighton-ocr": Family(
        "pixtral", "PixtralImageProcessor", {"size": {"longest_edge": 168}, "patch_size": 28},
        {"patch_size": 14, "spatial_merge_size": 2}, 14, "lighton_ocr.processing_lighton_ocr:LightOnOcrProcessor",
        {"image_token": "[IMG]", "effective_patch_size": 28}, model_type="lighton_ocr",
    ),
}  # fmt: skip


def normalized(ours: ImageProcessor, array: np.ndarray) -> np.ndarray:
    """What an encoder reads: the table applied to bytes whose second axis is the channel."""
    table = ours.value_table()
    return np.stack([table[channel][array[:, channel]] for channel in range(3)], axis=1)


def as_reference(ours: ImageProcessor, values: np.ndarray, outputs: Mapping[str, Any]) -> np.ndarray:
    """An array in the shape of the reference's `pixel_values`."""
    if ours.name == "Qwen2VLImageProcessor":
        return np.repeat(values, 2, axis=2).reshape(values.shape[0], -1)
    if ours.name == "Gemma4ImageProcessor":
        return in_patches(values, ours.patch_size, np.asarray(outputs["pixel_values"]).shape[1])
    return values.reshape(np.asarray(outputs["pixel_values"]).shape)


def in_patches(values: np.ndarray, size: int, count: int) -> np.ndarray:
    """A picture [1, 3, height, width] in rows of patches with their channels last, and zeros behind them."""
    _, _, height, width = values.shape
    rows = values.reshape(3, height // size, size, width // size, size).transpose(1, 3, 2, 4, 0)
    patches = rows.reshape(-1, 3 * size**2)
    return np.pad(patches, ((0, count - len(patches)), (0, 0)))[None]
