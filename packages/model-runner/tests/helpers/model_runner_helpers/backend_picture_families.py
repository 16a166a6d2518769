"""Tiny checkpoints of classes whose encoder is that of transformers; see `picture_families`."""

from __future__ import annotations

from typing import Any

import torch

from model_runner_helpers.picture_families import (
    CLIP,
    CLIP_FILES,
    LLAVA_FILES,
    PLACEHOLDER,
    TEXT,
    VIDEO_PLACEHOLDER,
    PictureFamily,
    before_language_model,
    before_language_model_alone,
    kinds_of,
    of_any_size,
    one_each,
    tiles_of,
)

_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 3, "image_size": 56, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 112, "patch_size": 14, "hidden_act": "silu"}  # fmt: skip
_SQUARE = {"size": {"height": 56, "width": 56}}
_GRIDS = [[56, 112], [112, 56], [112, 112], [168, 56]]
_QWEN2 = TEXT | {"model_type": "qwen2", "rope_theta": 1e6}


def in_patches_of_8(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Pictures in rows of patches with their channels last, and the places of these; -1 behind the last one."""
    count = max(rows * columns for _, rows, columns in layouts)
    pixels, places = torch.zeros(len(values), count, 192), torch.full((len(values), count, 2), -1)
    for number, (picture, (_, rows, columns)) in enumerate(zip(values, layouts, strict=True)):
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            square = picture[0, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
            pixels[number, place] = square.permute(1, 2, 0).flatten()
            places[number, place] = torch.tensor([column, row])
    return {"pixel_values": pixels, "image_position_ids": places}


_GEMMA_4_VISION = {"model_type": "gemma4_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
                   "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "patch_size": 8,
                   "position_embedding_size": 512, "pooling_kernel_size": 2}  # fmt: skip
GEMMA_4_AUDIO = {"model_type": "gemma4_audio", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
                 "subsampling_conv_channels": [16, 4], "conv_kernel_size": 3, "output_proj_dims": 20,
                 "attention_chunk_size": 4, "attention_context_left": 5}  # fmt: skip
GEMMA_4_FEATURES = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16}
_GEMMA_4_TEXT = TEXT | {
    "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 11, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA_4_FILES = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 8, "pooling_kernel_size": 2,
                  "max_soft_tokens": 70}  # fmt: skip
_GEMMA_4_TOKENS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": VIDEO_PLACEHOLDER,
    "audio_token_id": 9999,
}  # which no model says
BACKEND_FAMILIES: dict[str, PictureFamily] = {
    "gemma 4": PictureFamily(
        "Gemma4",
        {"text_config": _GEMMA_4_TEXT | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                                         "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
         "vision_config": _GEMMA_4_VISION | {"standardize": True}, "audio_config": None, **_GEMMA_4_TOKENS},
        _GEMMA_4_FILES, in_patches_of_8, spread=0.2, by_tokens=kinds_of,
    ),
    "gemma 4 with vectors of tokens": PictureFamily(
        "Gemma4",
        {"text_config": _GEMMA_4_TEXT | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
                                         "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "pad_token_id": 3},
         "vision_config": _GEMMA_4_VISION | {"use_clipped_linears": True}, "audio_config": GEMMA_4_AUDIO,
         **_GEMMA_4_TOKENS},
        _GEMMA_4_FILES, in_patches_of_8, {"feature_extractor": GEMMA_4_FEATURES}, by_tokens=kinds_of,
    ),
    "vip llava": PictureFamily(
        "VipLlava", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP,
                     "image_token_index": PLACEHOLDER, "vision_feature_layers": [-2, -3, 1]},
        {"image_processor_type": "CLIPImageProcessor", **CLIP_FILES}, one_each, LLAVA_FILES, before_language_model,
    ),
    "llava with siglip": PictureFamily(
        "Llava", {"text_config": _QWEN2, "vision_config": _SIGLIP, "image_token_index": PLACEHOLDER,
                  "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "SiglipImageProcessor", **_SQUARE}, one_each,
        {"patch_size": 14, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
        before_language_model,
    ),
    "llava with pixtral": PictureFamily(
        "Llava", {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
                  "vision_config": _PIXTRAL, "image_token_index": PLACEHOLDER, "image_seq_length": 1,
                  "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
        of_any_size, {"patch_size": 14}, before_language_model_alone,
    ),
    "llava next with siglip": PictureFamily(
        "LlavaNext",
        {"text_config": TEXT | {"model_type": "granite", "logits_scaling": 2.0, "embedding_multiplier": 3.0},
         "vision_config": _SIGLIP, "image_grid_pinpoints": _GRIDS, "image_token_index": PLACEHOLDER,
         "vision_feature_layer": [-3, 1, -1], "vision_feature_select_strategy": "full"},
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"height": 56, "width": 56},
         "crop_size": {"height": 56, "width": 56}, "image_grid_pinpoints": _GRIDS},
        tiles_of, {"patch_size": 14, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
        before_language_model, logit_scale=0.5,
    ),
    "llava onevision": PictureFamily(
        "LlavaOnevision",
        {"text_config": _QWEN2, "vision_config": _SIGLIP, "image_grid_pinpoints": [*_GRIDS, [168, 168]],
         "image_token_index": PLACEHOLDER, "video_token_index": 95, "vision_aspect_ratio": "anyres_max_2"},
        {"image_processor_type": "LlavaOnevisionImageProcessor", **_SQUARE,
         "image_grid_pinpoints": [*_GRIDS, [168, 168]]},
        tiles_of, {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"}, before_language_model,
        sizes=((70, 50), (30, 95), (180, 170)),
    ),
    "aya vision": PictureFamily(
        "AyaVision",
        {"text_config": TEXT | {"model_type": "cohere2", "sliding_window": 11, "sliding_window_pattern": 2,
                                "head_dim": 8, "logit_scale": 0.5},
         "vision_config": _SIGLIP, "image_token_index": PLACEHOLDER, "downsample_factor": 2},
        {"image_processor_type": "GotOcr2ImageProcessor", **_SQUARE, "min_patches": 1, "max_patches": 4},
        one_each, {"img_size": 56, "patch_size": 14, "downsample_factor": 2}, before_language_model,
        logit_scale=0.5,
    ),
    "lighton ocr": PictureFamily(
        "LightOnOcr",
        {"text_config": TEXT | {"model_type": "qwen3", "head_dim": 8}, "vision_config": _PIXTRAL,
         "image_token_id": PLACEHOLDER, "spatial_merge_size": 2, "tie_word_embeddings": False},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 28},
        of_any_size, {"patch_size": 14, "spatial_merge_size": 2},
    ),
}  # fmt: skip
