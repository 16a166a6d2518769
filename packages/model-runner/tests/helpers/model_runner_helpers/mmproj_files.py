"""Checkpoints of the hub as two GGUF files, as llama.cpp's converters write them.

Names come from the tables of the format's own library. What the converters do besides is repeated here: rows of rotated
heads in pairs, norms of Gemma with 1 added, matrices of Qwen-VL in parts, and the names of the first files of LLaVA.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model_runner_helpers.picture_families import FAMILIES, PictureFamily

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

PROJECTORS: Mapping[str, tuple[str, str]] = {
    "idefics3": ("idefics3", "llama"), "gemma 3": ("gemma3", "gemma3"), "llava": ("mlp", "llama"),
    "mistral 3": ("pixtral", "llama"), "internvl": ("internvl", "qwen2"), "qwen 2 vl": ("qwen2vl_merger", "qwen2vl"),
    "qwen 2.5 vl": ("qwen2.5vl_merger", "qwen2vl"), "qwen 3 vl": ("qwen3vl_merger", "qwen3vl"),
}  # fmt: skip
"""Families to the projector and the architecture of the text model."""
_TEXT_STARTS = ("language_model.model.", "model.language_model.", "model.text_model.")
_SUFFIXES = (".weight", ".bias")
Tensors = Iterator[tuple[str, torch.Tensor]]


def write_two_files(
    folder: Path, family: PictureFamily, kind: str = "F32", add_tokenizer: Callable[[Any], None] = lambda writer: None
) -> tuple[Path, Path]:
    """The text model and the encoder of a checkpoint in `folder`; both files are written beside it.

    `kind`: Type of matrices of the encoder, except for those that converters keep.
    """
    is_pixtral = family.config["vision_config"].get("model_type") == "pixtral" and family.class_name == "Llava"
    projector, architecture = (
        ("pixtral", "llama")
        if is_pixtral
        else next(both for name, both in PROJECTORS.items() if FAMILIES[name].class_name == family.class_name)
    )
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    text, pictures = folder / "text.gguf", folder / "mmproj.gguf"
    _write_text(text, architecture, config, state, add_tokenizer)
    writer = gguf.GGUFWriter(pictures, "clip")
    _add_vision(writer, projector, config, family)
    for name, tensor in _vision_tensors(projector, config, state):
        is_kept = kind == "F32" or tensor.dim() != 2 or "position" in name or tensor.shape[1] % 32
        values = tensor.float().contiguous().numpy()
        if is_kept:
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    _finish(writer)
    return text, pictures


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_text(
    path: Path, architecture: str, config: Mapping[str, Any], state: Mapping[str, torch.Tensor],
    add_tokenizer: Callable[[Any], None],
) -> None:  # fmt: skip
    text = config.get("text_config", config)
    heads, shared = text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(text.get("rope_theta", 1e6 if architecture == "gemma3" else 1e4))
    if architecture == "gemma3":
        writer.add_sliding_window(text["sliding_window"])
    if architecture in ("qwen2vl", "qwen3vl"):
        writer.add_rope_dimension_sections([*text["rope_scaling"]["mrope_section"], 0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], text["num_hidden_layers"])
    for name, tensor in _text_tensors(state):
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = in_pairs(tensor, heads if "q_proj" in name else shared)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(names.get_name(name, try_suffixes=_SUFFIXES), tensor.float().contiguous().numpy())
    _finish(writer)


def _text_tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    for name, tensor in state.items():
        own = name.removeprefix("language_model.") if "lm_head" in name else name
        for start in _TEXT_STARTS:
            own = f"model.{own.removeprefix(start)}" if own.startswith(start) else own
        if own == "lm_head.weight" or re.match(r"model\.(embed_tokens|norm|layers)\.", own):
            yield own, tensor


def in_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of heads whose halves are rotated together, in the order of pairs."""
    return tensor.view(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_vision(writer: Any, projector: str, config: Mapping[str, Any], family: PictureFamily) -> None:
    vision, options = config["vision_config"], family.preprocessor
    text = config.get("text_config", config)
    depth = vision.get("depth") or vision["num_hidden_layers"]
    if projector != "mlp":  # written before files had a type
        writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    writer.add_vision_projection_dim(text["hidden_size"])
    size = vision.get("image_size") or 560
    writer.add_vision_image_size(size[0] if isinstance(size, list) else size)
    patch = vision["patch_size"]
    writer.add_vision_patch_size(patch[0] if isinstance(patch, list) else patch)
    writer.add_vision_embedding_length(vision.get("embed_dim") or vision["hidden_size"])
    # The converter of Qwen2-VL has the width of the text model here.
    writer.add_vision_feed_forward_length(vision.get("intermediate_size") or vision["hidden_size"])
    writer.add_vision_block_count(depth - (projector == "mlp"))
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    ours = family.ours()
    writer.add_vision_image_mean(list(ours.image_mean))
    writer.add_vision_image_std(list(ours.image_std))
    defaults = {"mlp": 1e-5, "pixtral": 1e-5}
    writer.add_vision_attention_layernorm_eps(defaults.get(projector, 1e-6))
    if projector in ("qwen2.5vl_merger", "pixtral"):
        writer.add_vision_use_silu(True)
    elif projector not in ("mlp", "qwen2vl_merger"):
        writer.add_vision_use_gelu(True)
    if projector == "idefics3":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(options["size"]["longest_edge"])
    if projector == "gemma3":
        writer.add_vision_projector_scale_factor(vision["image_size"] // patch // 2)
    if projector == "internvl":
        writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
        writer.add_vision_preproc_min_tiles(options["min_patches"])
        writer.add_vision_preproc_max_tiles(options["max_patches"])
    if projector == "pixtral":
        writer.add_vision_spatial_merge_size(config.get("spatial_merge_size", 1))
    if projector == "qwen2.5vl_merger":
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
    if projector == "qwen3vl_merger":
        deep = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([number in deep for number in range(depth)])
    if "qwen" in projector:
        writer.add_uint32("clip.vision.image_min_pixels", options["min_pixels"])
        writer.add_uint32("clip.vision.image_max_pixels", options["max_pixels"])


def _vision_tensors(projector: str, config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Tensors:
    vision = config["vision_config"]
    depth = vision.get("depth") or vision["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 4))  # of projectors too
    text = {name for name, _ in _text_tensors(state)}
    for name, tensor in state.items():
        is_of_text = name.startswith((*_TEXT_STARTS, "lm_head", "language_model")) or name in text
        if is_of_text or "vision_model.head." in name:
            continue
        if projector == "mlp":
            yield from _of_first_files(name, tensor, depth - 1)
            continue
        for own, part in _converted(projector, name, tensor, vision):
            is_named = own.startswith(("v.", "mm."))
            yield own if is_named else names.get_name(own, try_suffixes=_SUFFIXES), part


def _converted(projector: str, name: str, tensor: torch.Tensor, vision: Mapping[str, Any]) -> Tensors:
    if "qwen" in projector:
        name = name.removeprefix("model.")
        if "patch_embed.proj.weight" in name:
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif ".qkv." in name and projector != "qwen3vl_merger":
            for part, letter in zip(tensor.chunk(3), "qkv", strict=True):
                yield name.replace("qkv", letter), part
        elif projector == "qwen3vl_merger" and (own := _of_merger(name, vision)):
            yield own, tensor
        else:
            yield name, tensor
        return
    if projector == "gemma3":
        name = name.replace("_weight", ".weight")
        tensor = tensor + 1 if "soft_emb_norm" in name else tensor
    if projector == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = in_pairs(tensor, vision["num_attention_heads"])
    if projector == "internvl":
        of_hub = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
        stem = name.removeprefix("multi_modal_projector.").rpartition(".")
        name = f"{of_hub[stem[0]]}.{stem[2]}" if name.startswith("multi_modal_projector.") else f"model.{name}"
        is_bare = ".lambda_" in name or "position_embedding" in name
        name = f"{name}.weight" if is_bare and not name.endswith(".weight") else name
    yield name, tensor


def _of_merger(name: str, vision: Mapping[str, Any]) -> str | None:
    """Names of what joins Qwen3-VL's encoder to the text model."""
    if found := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(norm|fc1|fc2)\.(\w+)", name):
        return f"v.deepstack.{vision['deepstack_visual_indexes'][int(found[1])]}.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"visual\.merger\.linear_fc([12])\.(\w+)", name):
        return f"mm.{(int(found[1]) - 1) * 2}.{found[2]}"
    return name.replace("visual.merger.norm", "v.post_ln") if "merger.norm" in name else None


def _of_first_files(name: str, tensor: torch.Tensor, depth: int) -> Tensors:
    """As the first converter of LLaVA named them: it has the two matrices of a feed-forward the other way around."""
    if name.startswith("multi_modal_projector."):
        own = name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2")
        yield own, tensor
        return
    layer = re.search(r"encoder\.layers\.(\d+)\.", name)
    if "post_layernorm" in name or (layer is not None and int(layer[1]) >= depth):
        return
    for old, new in (
        ("vision_tower.vision_model", "v"), ("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""),
        ("self_attn.", "attn_"), ("layer_norm", "ln"), ("layernorm", "ln"), ("mlp.fc1", "ffn_down"),
        ("mlp.fc2", "ffn_up"), ("embedding", "embd"), ("layrnorm", "ln"),
    ):  # fmt: skip
        name = name.replace(old, new)
    yield name, tensor
