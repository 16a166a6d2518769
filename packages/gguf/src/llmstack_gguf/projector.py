"""Encoders of pictures in GGUF files of their own, beside that of a text model.

llama.cpp calls such a file `mmproj`. Its keys are those of `tools/mtmd/clip-impl.h`, and the values that a file leaves
out are those of `tools/mtmd/clip.cpp`. The folder of both files describes one model, as a repository would.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.variants import Values

ARCHITECTURE = "clip"
"""`general.architecture` of such a file."""
_MAX_LAYERS = 256
_MAX_SIDE = 16_384
_MIN_TOKENS, _MAX_TOKENS = 8, 4096
"""Vectors of a picture of Qwen-VL, where the file has no limits."""
_TANH = "gelu_pytorch_tanh"


class _Form(NamedTuple):
    """The form of files with one kind of projector.

    Attributes:
        whole: The class of the model of both files, by the type of the text model; `""` is any other type.
        last: The matrix whose outputs are as wide as the text model; its inputs are, where `is_transposed`.
        fields: The configuration of the encoder, and other fields of the whole.
        files: The options of the image processor, and those of what writes prompts.
    """

    whole: Mapping[str, str]
    last: str
    fields: Callable[[_Vision], tuple[dict[str, Any], dict[str, Any]]]
    files: Callable[[_Vision], tuple[dict[str, Any], dict[str, Any]]]
    is_transposed: bool = False


class _Vision:
    """The values of a file that all forms have."""

    def __init__(self, header: Header, text: Mapping[str, Any]) -> None:
        self.header, self.text = header, text
        self.values = values = Values(header.metadata, "clip.vision")
        self.size = self._positive("embedding_length")
        self.heads = self._positive("attention.head_count")
        self.layers = self._positive("block_count")
        self.patch_size = self._positive("patch_size")
        self.image_size = values.integer("image_size", 0)
        if self.layers > _MAX_LAYERS or self.image_size > _MAX_SIDE or self.size % self.heads:
            raise GGUFError("its sizes are no encoder's.")
        self.eps = values.number("attention.layer_norm_epsilon", 1e-6)

    def _positive(self, name: str) -> int:
        found = self.values.integer(name)
        if found < 1:
            raise GGUFError(f"clip.vision.{name} is missing or no count.")
        return found

    @property
    def inner_size(self) -> int:
        """The width of the feed-forward; some files say another number than their matrices have."""
        rows, columns = self.shape("v.blk.0.ffn_up.weight", 2)
        return rows if columns == self.size else columns

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    def shape(self, name: str, num_dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""
        info = self.header.tensors.get(name)
        if info is None or len(info.shape) != num_dimensions:
            raise GGUFError(f"it has no tensor {name} of {num_dimensions} dimensions.")
        return info.shape

    def common(self, model_type: str, activation: str) -> dict[str, Any]:
        return {
            "model_type": model_type, "hidden_size": self.size, "intermediate_size": self.inner_size,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "image_size": self.image_size,
            "patch_size": self.patch_size, "hidden_act": activation, "layer_norm_eps": self.eps,
        }  # fmt: skip

    def activation(self, otherwise: str) -> str:
        """By `clip.use_gelu` and `clip.use_silu`."""
        for name, found in (("use_silu", "silu"), ("use_gelu", "gelu")):
            if self.header.metadata.get(f"clip.{name}") is True:
                return found
        return otherwise

    def processor(self, class_name: str, **options: Any) -> dict[str, Any]:
        """Options of an image processor, with mean and deviation of each channel."""
        found = {"image_processor_type": class_name, **options}
        for name in ("image_mean", "image_std"):
            numbers = self.header.metadata.get(f"clip.vision.{name}")
            if not isinstance(numbers, array) or len(numbers) != 3 or not all(map(math.isfinite, numbers)):
                raise GGUFError(f"clip.vision.{name} is missing or not three numbers.")
            found[name] = [float(number) for number in numbers]
        return found

    def square(self) -> dict[str, int]:
        return {"height": self.image_size, "width": self.image_size}

    def scale(self, default: int) -> int:
        """Patches per side that become one vector."""
        found = self.values.integer("projector.scale_factor", default)
        if found < 1 or self.patches_per_side < found:
            raise GGUFError("clip.vision.projector.scale_factor fits no picture.")
        return found

    def merge_size(self, default: int) -> int:
        found = self.values.integer("spatial_merge_size", default)
        if not 1 <= found <= 64:
            raise GGUFError("clip.vision.spatial_merge_size fits no picture.")
        return found


_Parts = tuple[dict[str, Any], dict[str, Any]]


def _idefics3(own: _Vision) -> _Parts:
    return own.common("idefics3_vision", _TANH), {"scale_factor": own.scale(2)}


def _idefics3_files(own: _Vision) -> _Parts:
    longest = own.values.integer("preproc_image_size", 0)
    options = own.processor(
        "Idefics3ImageProcessor", size={"longest_edge": longest or own.image_size},
        max_image_size={"longest_edge": own.image_size}, do_image_splitting=longest > 0,
    )  # fmt: skip
    return options, {"image_seq_len": own.patches_per_side**2 // own.scale(2) ** 2}


def _gemma3(own: _Vision) -> _Parts:
    num_vectors = (own.patches_per_side // own.scale(4)) ** 2
    return own.common("siglip_vision_model", _TANH), {"mm_tokens_per_image": num_vectors}


def _gemma3_files(own: _Vision) -> _Parts:
    num_vectors = (own.patches_per_side // own.scale(4)) ** 2
    return own.processor("Gemma3ImageProcessor", size=own.square()), {"image_seq_length": num_vectors}


def _llava(own: _Vision) -> _Parts:
    metadata = own.header.metadata
    if "clip.vision.image_grid_pinpoints" in metadata or "clip.vision.feature_layer" in metadata:
        raise GGUFError("tiles of a picture (LLaVA 1.6) and several layers of features are not supported as GGUF.")
    if "v.class_embd" not in own.header.tensors:
        raise GGUFError("an encoder without a class token is not supported with this projector.")
    # The file ends with the layer whose states are used.
    return own.common("clip_vision_model", own.activation("quick_gelu")), {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }  # fmt: skip


def _llava_files(own: _Vision) -> _Parts:
    options = own.processor(
        "CLIPImageProcessor", size={"shortest_edge": own.image_size}, crop_size=own.square()
    )  # fmt: skip
    return options, {
        "patch_size": own.patch_size, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
    }  # fmt: skip


def _pixtral(own: _Vision) -> _Parts:
    vision = own.common("pixtral", own.activation("gelu"))
    theta = own.values.number("rope.freq_base", 10_000.0)
    return vision | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}, {
        "spatial_merge_size": own.merge_size(1), "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in own.header.tensors,
    }  # fmt: skip


def _pixtral_files(own: _Vision) -> _Parts:
    merge = own.merge_size(1)
    options = own.processor(
        "PixtralImageProcessor", size={"longest_edge": own.image_size}, patch_size=own.patch_size * merge
    )
    return options, {"patch_size": own.patch_size, "spatial_merge_size": merge}


def _internvl(own: _Vision) -> _Parts:
    vision = own.common("internvl_vision", "gelu") | {
        "image_size": [own.image_size] * 2, "patch_size": [own.patch_size] * 2,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in own.header.tensors,
        "attention_bias": "v.blk.0.attn_q.bias" in own.header.tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in own.header.tensors else "rms_norm",
    }  # fmt: skip
    return vision, {"downsample_ratio": 1 / own.scale(2), "vision_feature_layer": -1}


def _internvl_files(own: _Vision) -> _Parts:
    most = own.values.integer("preproc_max_tiles", 12)
    options = own.processor(
        "GotOcr2ImageProcessor", size=own.square(), crop_to_patches=True,
        min_patches=own.values.integer("preproc_min_tiles", 1), max_patches=most,
    )  # fmt: skip
    return options, {"image_seq_length": (own.patches_per_side // own.scale(2)) ** 2}


def _qwen(own: _Vision, model_type: str, activation: str) -> dict[str, Any]:
    return {
        "model_type": model_type, "depth": own.layers, "num_heads": own.heads, "hidden_size": own.size,
        "intermediate_size": own.inner_size, "out_hidden_size": own.text["hidden_size"], "patch_size": own.patch_size,
        "spatial_merge_size": own.merge_size(2), "temporal_patch_size": 2, "hidden_act": activation,
    }  # fmt: skip


def _qwen2(own: _Vision) -> _Parts:
    vision = _qwen(own, "qwen2_vl", "quick_gelu") | {
        "embed_dim": own.size, "hidden_size": own.text["hidden_size"], "mlp_ratio": own.inner_size / own.size,
    }  # fmt: skip
    return vision, {}


def _qwen2_5(own: _Vision) -> _Parts:
    pattern = own.values.integer("n_wa_pattern")
    if pattern < 1:
        raise GGUFError("clip.vision.n_wa_pattern is missing or no count.")
    vision = _qwen(own, "qwen2_5_vl", "silu") | {
        "fullatt_block_indexes": [*range(pattern - 1, own.layers, pattern)],
        "window_size": own.values.integer("window_size", 112),
    }  # fmt: skip
    return vision, {}


def _qwen3(own: _Vision) -> _Parts:
    flags = own.header.metadata.get("clip.vision.is_deepstack_layers")
    if not isinstance(flags, array) or len(flags) != own.layers:
        raise GGUFError(f"clip.vision.is_deepstack_layers has no entry for each of {own.layers} layers.")
    vision = _qwen(own, "qwen3_vl", _TANH) | {
        "num_position_embeddings": own.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": deep_layers(own.header),
    }  # fmt: skip
    return vision, {}


def deep_layers(header: Header) -> list[int]:
    """The layers of Qwen3-VL's encoder whose states are given to the text model's first layers."""
    flags = header.metadata.get("clip.vision.is_deepstack_layers")
    return [number for number, flag in enumerate(flags) if flag] if isinstance(flags, array) else []


def _qwen_files(own: _Vision) -> _Parts:
    vector = (own.patch_size * own.merge_size(2)) ** 2
    options = own.processor(
        "Qwen2VLImageProcessor", patch_size=own.patch_size, merge_size=own.merge_size(2), temporal_patch_size=2,
        min_pixels=own.values.integer("image_min_pixels", _MIN_TOKENS * vector),
        max_pixels=own.values.integer("image_max_pixels", _MAX_TOKENS * vector),
    )  # fmt: skip
    return options, {}


_INTERNVL_TEXTS = dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe"), "InternVLForConditionalGeneration")
_FORMS: Mapping[str, _Form] = {
    "gemma3": _Form(
        {"gemma3_text": "Gemma3ForConditionalGeneration"}, "mm.input_projection.weight", _gemma3, _gemma3_files,
        is_transposed=True,
    ),
    "idefics3": _Form({"llama": "Idefics3ForConditionalGeneration"}, "mm.model.fc.weight", _idefics3, _idefics3_files),
    "internvl": _Form(_INTERNVL_TEXTS, "mm.model.mlp.3.weight", _internvl, _internvl_files),
    "mlp": _Form({"llama": "LlavaForConditionalGeneration"}, "mm.2.weight", _llava, _llava_files),
    "pixtral": _Form({"llama": "Mistral3ForConditionalGeneration"}, "mm.2.weight", _pixtral, _pixtral_files),
    "qwen2.5vl_merger": _Form({"qwen2": "Qwen2_5_VLForConditionalGeneration"}, "mm.2.weight", _qwen2_5, _qwen_files),
    "qwen2vl_merger": _Form({"qwen2": "Qwen2VLForConditionalGeneration"}, "mm.2.weight", _qwen2, _qwen_files),
    "qwen3vl_merger": _Form(
        {"qwen3": "Qwen3VLForConditionalGeneration", "qwen3_moe": "Qwen3VLMoeForConditionalGeneration"},
        "mm.2.weight", _qwen3, _qwen_files,
    ),
}  # fmt: skip
# Types of the whole and of its text model, where the text model's own type says less.
_TYPES: Mapping[str, tuple[str, str]] = {
    "Gemma3ForConditionalGeneration": ("gemma3", ""),
    "Idefics3ForConditionalGeneration": ("idefics3", ""),
    "InternVLForConditionalGeneration": ("internvl", ""),
    "LlavaForConditionalGeneration": ("llava", ""),
    "Mistral3ForConditionalGeneration": ("mistral3", ""),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
}
# Of the text model's configuration, what belongs to the whole.
_OF_WHOLE = ("dtype", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id")


def projector_kind(header: Header) -> str:
    """`clip.projector_type`; the first files of LLaVA have none.

    Raises:
        GGUFError: The file has no encoder of pictures that is supported.
    """
    if header.architecture != ARCHITECTURE or header.metadata.get("clip.has_vision_encoder") is not True:
        raise GGUFError("it has no encoder of pictures.")
    found = header.metadata.get("clip.vision.projector_type") or header.metadata.get("clip.projector_type", "mlp")
    if found not in _FORMS:
        raise GGUFError(f"the projector {str(found)[:64]!r} is not supported; {', '.join(_FORMS)} are.")
    return str(found)


def picture_files(header: Header, text: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`config.json`, `preprocessor_config.json` and `processor_config.json` of a model of two files.

    `text`: `config.json` of the text model.

    Raises:
        GGUFError: The encoder is not supported, is of another model, or a value is missing.
    """
    form, text_type = _FORMS[projector_kind(header)], str(text["model_type"])
    whole = form.whole.get(text_type)
    if whole is None:
        types = ", ".join(form.whole)
        raise GGUFError(f"it belongs to a text model of the type {types}, and that of the other file is {text_type}.")
    own = _Vision(header, text)
    width = own.shape(form.last, 2)[form.is_transposed]
    if width != text["hidden_size"]:
        raise GGUFError(f"its vectors have {width} numbers, and those of the text model {text['hidden_size']}.")
    if whole.startswith("Mistral3") and "mm.patch_merger.weight" not in header.tensors:
        whole, model_types = "LlavaForConditionalGeneration", ("llava", "")
    else:
        model_types = _TYPES[whole]
    if whole.startswith("Qwen") and "rope_scaling" not in text:
        raise GGUFError("the text model's file does not say how three axes share its rotary embedding.")
    vision, fields = form.fields(own)
    options, processor = form.files(own)
    inner = {key: value for key, value in text.items() if key not in (*_OF_WHOLE, "architectures")}
    config = {
        "architectures": [whole], "model_type": model_types[0], "vision_config": vision,
        "text_config": {**inner, "model_type": model_types[1] or text_type},
        **{key: text[key] for key in _OF_WHOLE if key in text}, **fields,
    }  # fmt: skip
    return {"config.json": config, "preprocessor_config.json": options, "processor_config.json": processor}
