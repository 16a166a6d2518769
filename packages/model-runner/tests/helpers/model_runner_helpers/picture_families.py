"""Tiny checkpoints of families that take pictures, in the form of the hub, with transformers as the reference."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from llmstack_media import ImageProcessor, VideoProcessor, image_processor, processors
from llmstack_media.decode.clips import Clip
from llmstack_media.processors.layout import Piece
from llmstack_types import MediaItem, MediaMemory

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PLACEHOLDER = 96
VIDEO_PLACEHOLDER = 95
"""The ids of every placeholder; text in between has ids from 50 to 89, and prompts have those below."""


def as_it_is(name: str) -> str:
    return name


@dataclass(frozen=True)
class PictureFamily:
    """A checkpoint by its files.

    Attributes:
        class_name: Of transformers, without `ForConditionalGeneration`.
        config: `config.json` in the form of the hub.
        preprocessor: `preprocessor_config.json`; `processor` is `processor_config.json`.
        hub_name: From a name of transformers 5 to the hub's.
        inputs: From values in the shape of the bytes and the layouts of all pictures to what transformers reads.
    """

    class_name: str
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    inputs: Callable[[list[torch.Tensor], list[tuple[int, ...]]], dict[str, Any]]
    processor: Mapping[str, Any] = field(default_factory=dict)
    hub_name: Callable[[str], str] = as_it_is
    sizes: tuple[tuple[int, int], ...] = ((70, 50), (30, 95), (64, 64))
    """Of pictures, width and height."""
    spread: float = 0.25
    """Of random matrices. Sums in another order change more of what delta nets compute, so theirs are smaller."""
    offset_norms: str = "(?!)"
    """Of names of norms whose scale is stored minus 1."""
    by_tokens: Callable[[list[int]], dict[str, Any]] = lambda tokens: {}
    """From token ids to what transformers reads besides them, with or without pictures."""
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    logit_scale: float = 1.0
    """Of the text model, which transformers' class with pictures leaves out."""

    @property
    def name(self) -> str:
        return f"{self.class_name}ForConditionalGeneration"

    def item(self, seed: int) -> Picture:
        """A random item, which begins at place 0."""
        return prepare(self.ours(), self.sizes[seed % len(self.sizes)], seed)

    def nested(self) -> dict[str, Any]:
        """`processor_config.json` as transformers 5 writes it."""
        return {**self.processor, "image_processor": self.preprocessor,
                "video_processor": self.video_preprocessor or self.preprocessor}  # fmt: skip

    def ours(self) -> ImageProcessor:
        return image_processor(self.preprocessor, self.processor, model=self._typed_config())

    def ours_of_videos(self) -> VideoProcessor:
        found = processors(
            self.preprocessor, self.processor, model=self._typed_config(),
            video_preprocessor=self.video_preprocessor,
        ).video  # fmt: skip
        assert found is not None
        return found

    def _placeholders(self, vocab_size: int) -> list[int]:
        """Ids of tokens in place of items."""
        names = [f"{kind}_token_{end}" for kind in ("audio", "image", "video") for end in ("id", "index")]
        given = {self.config[name] for name in names if self.config.get(name, vocab_size) < vocab_size}
        return sorted({PLACEHOLDER, VIDEO_PLACEHOLDER} | given)

    def _typed_config(self) -> dict[str, Any]:
        return {"model_type": getattr(transformers, self.name).config_class.model_type, **self.config}

    def write(self, folder: Path, *, is_hub: bool = True) -> Any:
        """Writes a checkpoint with random weights and returns transformers' model of it.

        `is_hub`: Names and files are the hub's; otherwise those that transformers 5 writes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        model_class = getattr(transformers, self.name)
        config = {"architectures": [self.name], "dtype": "float32", **self._typed_config()}
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        made = model_class(transformers.AutoConfig.from_pretrained(folder)).eval()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                spread = 0.1 if parameter.dim() == 1 else self.spread
                is_scale = parameter.dim() == 1 and not name.endswith(("bias", "embedding", "image_newline"))
                is_scale = is_scale and not re.search(self.offset_norms, name)
                parameter.copy_(torch.randn_like(parameter) * spread + is_scale)
            for name, bound in made.named_buffers():
                if bound.dim() == 0 and name.endswith(("_min", "_max")):
                    bound.fill_(-0.8 if name.endswith("_min") else 0.7)
            # No output is one, which would ask for a vector.
            head = made.get_output_embeddings().weight
            head[self._placeholders(len(head))] = 0
        if is_hub:
            state = {self.hub_name(key): value.contiguous().clone() for key, value in made.state_dict().items()}
            save_file(state, folder / "model.safetensors", {"format": "pt"})
            (folder / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
            if self.processor:
                (folder / "processor_config.json").write_text(json.dumps(self.processor))
            if self.video_preprocessor:
                (folder / "video_preprocessor_config.json").write_text(json.dumps(self.video_preprocessor))
        else:
            made.save_pretrained(folder)
            (folder / "processor_config.json").write_text(json.dumps(self.nested()))
        return model_class.from_pretrained(folder, dtype=torch.float32).eval()


class Picture(NamedTuple):
    """A prepared picture: its bytes for the runner and its values for transformers."""

    tokens: list[int]
    item: MediaItem
    values: torch.Tensor


def prepare(ours: ImageProcessor, size: tuple[int, int], seed: int) -> Picture:
    """A picture of random pixels, whose item begins at place 0."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    layout, array = ours.layout(width, height), ours.prepare(pixels)
    assert array.shape == layout.shape
    tokens, runs = ids_of(ours.placeholders(layout))
    item = MediaItem(b"", "image", 0, len(tokens), tuple(runs), layout.grid, layout.num_units)
    return _prepared(ours, array, tokens, item)


def prepare_video(ours: VideoProcessor, size: tuple[int, int], num_frames: int, seconds: float, seed: int) -> Picture:
    """A video of random pixels; its item begins at its first vector, which is not the first of the tokens."""
    width, height = size
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    layout = ours.layout(Clip(num_frames, seconds, width, height))
    array = ours.prepare([frames[index] for index in layout.frames], layout)
    assert array.shape == layout.shape
    tokens, runs = ids_of(ours.placeholders(layout), VIDEO_PLACEHOLDER)
    offset, end = runs[0][0], sum(runs[-1])
    own = tuple((start - offset, length) for start, length in runs)
    item = MediaItem(b"", "video", offset, end - offset, own, layout.grid, layout.num_units)
    return _prepared(ours, array, tokens, item)


def _prepared(ours: Any, array: Any, tokens: list[int], item: MediaItem) -> Picture:
    table = ours.value_table()
    values = np.stack([table[channel][array[:, channel]] for channel in range(3)], axis=1)
    data = array.tobytes()
    return Picture(tokens, with_bytes(item, data), torch.from_numpy(values))


def with_bytes(item: MediaItem, data: bytes) -> MediaItem:
    memory = MediaMemory(len(data), data=data)
    return replace(item, digest=hashlib.sha256(data).digest(), memory=memory)


def ids_of(pieces: Sequence[Piece], placeholder: int = PLACEHOLDER) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of what stands in for an item, and the runs that vectors replace."""
    tokens: list[int] = []
    runs = []
    for piece in pieces:
        if piece.num_vectors:
            runs.append((len(tokens), piece.num_vectors))
            tokens += [placeholder] * piece.num_vectors
        else:
            tokens += [50 + ord(piece.text[-2]) % 40, 50 + len(piece.text) % 40]
    return tokens, runs


def _crops(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    return {"pixel_values": torch.cat(values)[None]}


def one_each(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    return {"pixel_values": torch.cat(values)}


def tiles_of(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    most = max(map(len, values))
    padded = [torch.cat((one, torch.zeros(most - len(one), *one.shape[1:]))) for one in values]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([layout[1:] for layout in layouts])}


def of_patches(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    flat = [one.repeat_interleave(2, dim=2).flatten(1) for one in values]
    return {"pixel_values": torch.cat(flat), "image_grid_thw": torch.tensor(layouts)}


def of_any_size(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    height, width = (max(one.shape[side] for one in values) for side in (2, 3))
    padded = [torch.nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in values]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor([one.shape[2:] for one in values])}


def before_language_model_alone(name: str) -> str:
    """The same for a tower whose names have no `vision_model`."""
    return before_language_model(name).replace("vision_tower.vision_model.", "vision_tower.", 1)


def of_qwen_2_vl(name: str) -> str:
    """`model.layers.0…` and `visual.…`."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def is_placeholder(tokens: list[int]) -> torch.Tensor:
    return torch.tensor([[int(token == PLACEHOLDER) for token in tokens]])


def kinds_of(tokens: list[int]) -> dict[str, Any]:
    """1 where a picture's vector stands, 2 where a video's does."""
    return {"mm_token_type_ids": torch.tensor([[_KINDS.get(token, 0) for token in tokens]])}


def before_language_model(name: str) -> str:
    """`language_model.model.layers.0…`, `vision_tower.vision_model.…`: as repositories name their tensors."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    name = name.replace("vision_tower.", "vision_tower.vision_model.", 1) if "vision_model." not in name else name
    return name.replace("language_model.", "language_model.model.", 1)


_KINDS = {PLACEHOLDER: 1, VIDEO_PLACEHOLDER: 2}
M_ROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
_TOKENS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO_PLACEHOLDER}
QWEN_FILES = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 30}
_QWEN3_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32,
                 "patch_size": 14, "num_position_embeddings": 25}  # fmt: skip
_QWEN3_ROPE = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2],
                                                   "mrope_interleaved": True}}  # fmt: skip
_QWEN3_VISION_TEXT = TEXT | _QWEN3_ROPE | {"head_dim": 16, "num_hidden_layers": 4}
_HALVES: dict[str, Any] = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_VIDEO = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 120}}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 3, "image_size": 42, "patch_size": 14, "projection_dim": 32}  # fmt: skip
CLIP_FILES = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
LLAVA_FILES = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
_IDEFICS3 = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
                      "image_size": 64, "patch_size": 8},
    "scale_factor": 4, "image_token_id": PLACEHOLDER,
}  # fmt: skip
_CUTS = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 128},
         "max_image_size": {"longest_edge": 64}, "do_image_splitting": True}  # fmt: skip
FAMILIES: dict[str, PictureFamily] = {
    "idefics3": PictureFamily("Idefics3", _IDEFICS3, _CUTS, _crops, {"image_seq_len": 4}),
    "smolvlm": PictureFamily(
        "SmolVLM", {**_IDEFICS3, "scale_factor": 2, "tie_word_embeddings": True},
        {**_CUTS, "image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": 32}}, _crops,
        {"image_seq_len": 4},
    ),
    "gemma 3": PictureFamily(
        "Gemma3",
        {"text_config": TEXT | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 11,
                                "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
         "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40,
                           "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 56, "patch_size": 14},
         "mm_tokens_per_image": 4, "image_token_id": PLACEHOLDER, "boi_token_index": 95, "eoi_token_index": 94},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}, one_each,
        {"image_seq_length": 4}, before_language_model, offset_norms="",
        by_tokens=lambda tokens: {"token_type_ids": is_placeholder(tokens)},
    ),
    "llava": PictureFamily(
        "Llava", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "image_token_id": PLACEHOLDER,
                  "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        {"image_processor_type": "CLIPImageProcessor", **CLIP_FILES}, one_each, LLAVA_FILES, before_language_model,
    ),
    "internvl": PictureFamily(
        "InternVL",
        {"text_config": TEXT | {"model_type": "qwen2", "rope_theta": 1e6},
         "vision_config": {"model_type": "internvl_vision", "hidden_size": 24, "intermediate_size": 40,
                           "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": [56, 56],
                           "patch_size": [14, 14], "attention_bias": True, "use_qk_norm": True},
         "image_token_id": PLACEHOLDER, "image_seq_length": 4, "downsample_ratio": 0.5, "vision_feature_layer": -1,
         "tie_word_embeddings": False},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56},
         "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        one_each, {"image_seq_length": 4}, before_language_model_alone,
    ),
    "mistral 3": PictureFamily(
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None, "rope_theta": 1e6},
         "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
                           "num_attention_heads": 2, "image_size": 112, "patch_size": 14, "hidden_act": "silu"},
         "image_token_index": PLACEHOLDER, "spatial_merge_size": 2, "vision_feature_layer": -1,
         "tie_word_embeddings": False},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 28},
        of_any_size, {"patch_size": 14, "spatial_merge_size": 2}, before_language_model_alone,
    ),
    "qwen 2 vl": PictureFamily(
        "Qwen2VL",
        TEXT | {"rope_theta": 1e4, "rope_scaling": M_ROPE, "use_sliding_window": False, "tie_word_embeddings": False,
                "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14,
                                  "mlp_ratio": 2}, **_TOKENS},
        QWEN_FILES, of_patches, hub_name=of_qwen_2_vl,
        by_tokens=kinds_of,
    ),
    "qwen 2.5 vl": PictureFamily(
        "Qwen2_5_VL",
        TEXT | {"rope_theta": 1e4, "rope_scaling": M_ROPE, "use_sliding_window": False, "tie_word_embeddings": False,
                "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
                                  "out_hidden_size": 32, "patch_size": 14, "window_size": 56,
                                  "fullatt_block_indexes": [1], "tokens_per_second": 2}, **_TOKENS},
        QWEN_FILES, of_patches, hub_name=of_qwen_2_vl, sizes=((170, 90), (60, 195), (90, 90)),
        by_tokens=kinds_of,
    ),
    "qwen 3 vl": PictureFamily(
        "Qwen3VL",
        {"text_config": _QWEN3_VISION_TEXT | {"model_type": "qwen3_vl_text"},
         "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [0, 2], "model_type": "qwen3_vl"},
         "tie_word_embeddings": False, **_TOKENS},
        QWEN_FILES | _HALVES, of_patches, video_preprocessor=_HALVES | _VIDEO,
        by_tokens=kinds_of,
    ),
    "qwen 3 vl with experts": PictureFamily(
        "Qwen3VLMoe",
        {"text_config": _QWEN3_VISION_TEXT | {"model_type": "qwen3_vl_moe_text", "num_experts": 4,
                                              "num_experts_per_tok": 2, "moe_intermediate_size": 24},
         "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [1], "model_type": "qwen3_vl_moe"},
         "tie_word_embeddings": False, **_TOKENS},
        QWEN_FILES | _HALVES, of_patches, video_preprocessor=_HALVES | _VIDEO,
        by_tokens=kinds_of,
    ),
    "qwen 3.5": PictureFamily(
        "Qwen3_5",
        {"text_config": TEXT | {"model_type": "qwen3_5_text", "head_dim": 32, "num_hidden_layers": 4,
                                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                                "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
                                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
                                                    "mrope_interleaved": True}},
         "vision_config": _QWEN3_VISION | {"model_type": "qwen3_5"},
         "tie_word_embeddings": False, **_TOKENS},
        QWEN_FILES | _HALVES, of_patches, video_preprocessor=_HALVES | _VIDEO, spread=0.12,
        offset_norms=r"language_model\.(norm|.*(layer|[qk]_)norm)",
        by_tokens=kinds_of,
    ),
    "llava next": PictureFamily(
        "LlavaNext",
        {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "vision_config": CLIP,
         "image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42]], "image_token_id": PLACEHOLDER,
         "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        {"image_processor_type": "LlavaNextImageProcessor", **CLIP_FILES,
         "image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42]]},
        tiles_of, LLAVA_FILES, before_language_model,
    ),
}  # fmt: skip
