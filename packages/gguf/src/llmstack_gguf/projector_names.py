"""Repository names of the tensors of picture encoders in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.projector import deep_layers, projector_kind

_ATTENTION: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2",
}  # fmt: skip
_TWO_MATRICES: Mapping[str, str] = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_LAYER = re.compile(r"v\.blk\.(0|[1-9][0-9]{0,2})\.([a-z0-9_]+)\.(weight|bias)")
_DEEP = re.compile(r"v\.deepstack\.(0|[1-9][0-9]{0,2})\.(norm|fc1|fc2)\.(weight|bias)")
_DEEP_PARTS: Mapping[str, str] = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")


class PictureTensor(NamedTuple):
    """A tensor of a repository.

    Attributes:
        name: What repositories call it.
        sources: The tensors of the file that it is made of.
        form: How: `rows` of one after the other; `frames` of patches in a dimension of their own, the third; `pairs`,
            whose rows are in the order of what is rotated together; `less one`; `vector` and `vectors` with ones before
            their shape. Else as it is.
    """

    name: str
    sources: tuple[str, ...]
    form: str = ""


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of one kind of projector.

    Attributes:
        layers: The prefix of layers in repositories.
        layer: What is in a layer.
        ends: What is in none. A name with an ending is that of one tensor alone, here and there.
        forms: Of the names that repositories have in another form.
        ignored: What repositories have elsewhere.
        has_joined_heads: Whether queries, keys and values are one tensor in repositories.
    """

    layers: str
    layer: Mapping[str, str]
    ends: Mapping[str, str]
    forms: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    has_joined_heads: bool = False


def _siglip(prefix: str, ends: Mapping[str, str], forms: Mapping[str, str] | None = None) -> _Names:
    own = {
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.pre_ln": f"{prefix}pre_layrnorm",
        "v.post_ln": f"{prefix}post_layernorm",
        "v.class_embd": f"{prefix}embeddings.class_embedding",
    }
    return _Names(f"{prefix}encoder.layers.", {**_ATTENTION, **_TWO_MATRICES}, {**own, **ends}, forms or {})


_PROJECTION = "multi_modal_projector."
_QWEN2 = _Names(
    "visual.blocks.",
    {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2", **_TWO_MATRICES},
    {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2",
     "v.patch_embd": "visual.patch_embed.proj"},
    {_FRAMES[0]: "frames"},
    has_joined_heads=True,
)  # fmt: skip
_NAMES: Mapping[str, _Names] = {
    "gemma3": _siglip(
        "vision_tower.vision_model.",
        {"mm.input_projection.weight": f"{_PROJECTION}mm_input_projection_weight",
         "mm.soft_emb_norm": f"{_PROJECTION}mm_soft_emb_norm"},
        {"mm.soft_emb_norm.weight": "less one"},
    ),
    "idefics3": _siglip("model.vision_model.", {"mm.model.fc": "model.connector.modality_projection.proj"}),
    "mlp": _siglip(
        "vision_tower.vision_model.", {"mm.0": f"{_PROJECTION}linear_1", "mm.2": f"{_PROJECTION}linear_2"}
    ),
    "internvl": _Names(
        "vision_tower.encoder.layer.",
        {"attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
         "attn_out": "attention.projection_layer", "attn_q_norm": "attention.q_norm",
         "attn_k_norm": "attention.k_norm", "ln1": "layernorm_before", "ln2": "layernorm_after",
         "ls1.weight": "lambda_1", "ls2.weight": "lambda_2", **_TWO_MATRICES},
        {"v.class_embd": "vision_tower.embeddings.cls_token",
         "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
         "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
         "mm.model.mlp.0": f"{_PROJECTION}layer_norm", "mm.model.mlp.1": f"{_PROJECTION}linear_1",
         "mm.model.mlp.3": f"{_PROJECTION}linear_2"},
        {"v.class_embd": "vector", "v.position_embd.weight": "vectors"},
    ),
    "pixtral": _Names(
        "vision_tower.transformer.layers.",
        {"attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
         "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm",
         "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj"},
        {"v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
         "mm.1": f"{_PROJECTION}linear_1", "mm.2": f"{_PROJECTION}linear_2", "mm.input_norm": f"{_PROJECTION}norm",
         "mm.patch_merger": f"{_PROJECTION}patch_merger.merging_layer"},
        {"attn_q": "pairs", "attn_k": "pairs"},
        ignored=("v.token_embd.img_break",),  # the text model has it
    ),
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": replace(
        _QWEN2,
        layer={"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2", "ffn_gate": "mlp.gate_proj",
               "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "qwen3vl_merger": _Names(
        "model.visual.blocks.",
        {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2", "ffn_up": "mlp.linear_fc1",
         "ffn_down": "mlp.linear_fc2"},
        {"v.post_ln": "model.visual.merger.norm", "mm.0": "model.visual.merger.linear_fc1",
         "mm.2": "model.visual.merger.linear_fc2", "v.patch_embd": "model.visual.patch_embed.proj",
         "v.position_embd": "model.visual.pos_embed"},
        {_FRAMES[0]: "frames"},
    ),
}  # fmt: skip


def picture_tensors(header: Header) -> Iterator[PictureTensor]:
    """The tensors of a file with an encoder of pictures; unknown names are kept.

    Raises:
        GGUFError: The encoder is not supported, or a part of a tensor is missing.
    """
    names, deep = _NAMES[projector_kind(header)], deep_layers(header)
    for name in header.tensors:
        layer, further = _LAYER.fullmatch(name), _DEEP.fullmatch(name)
        if name in names.ignored or (name == _FRAMES[1] and names.forms.get(_FRAMES[0])):
            continue
        if further is not None and int(further[1]) in deep:
            part = f"{deep.index(int(further[1]))}.{_DEEP_PARTS[further[2]]}.{further[3]}"
            yield PictureTensor(f"model.visual.deepstack_merger_list.{part}", (name,))
        elif layer is not None:
            yield from _of_layer(header, names, layer)
        else:
            yield _of_none(header, names, name)


def _of_none(header: Header, names: _Names, name: str) -> PictureTensor:
    stem, _, kind = name.rpartition(".")
    own = names.ends.get(name) or (f"{names.ends[stem]}.{kind}" if stem in names.ends else name)
    form = names.forms.get(name, "")
    sources = _FRAMES if form == "frames" else (name,)
    missing = next((source for source in sources if source not in header.tensors), None)
    if missing is not None:
        raise GGUFError(f"it has no tensor {missing}.")
    return PictureTensor(own, sources, form)


def _of_layer(header: Header, names: _Names, found: re.Match[str]) -> Iterator[PictureTensor]:
    number, part, kind = found.groups()
    prefix = f"{names.layers}{number}."
    if names.has_joined_heads and part in ("attn_q", "attn_k", "attn_v"):
        if part == "attn_q":
            sources = tuple(f"v.blk.{number}.{each}.{kind}" for each in ("attn_q", "attn_k", "attn_v"))
            if any(source not in header.tensors for source in sources):
                raise GGUFError(f"layer {number} has not all of {', '.join(sources)}.")
            yield PictureTensor(f"{prefix}attn.qkv.{kind}", sources, "rows")
        return
    own = _unswapped(header, found)
    whole = names.layer.get(f"{own}.{kind}")
    if whole is None and own not in names.layer:
        yield PictureTensor(found[0], (found[0],))
        return
    yield PictureTensor(prefix + (whole or f"{names.layer[own]}.{kind}"), (found[0],), names.forms.get(own, ""))


def _unswapped(header: Header, found: re.Match[str]) -> str:
    """The part of a layer; the first files call the two matrices of the feed-forward by each other's names."""
    number, part, _ = found.groups()
    up, down = (header.tensors.get(f"v.blk.{number}.{each}.weight") for each in ("ffn_up", "ffn_down"))
    if part not in _TWO_MATRICES or up is None or down is None or f"v.blk.{number}.ffn_gate.weight" in header.tensors:
        return part
    size = header.metadata.get("clip.vision.embedding_length")
    is_swapped = down.shape[-1] == size != up.shape[-1]  # the inputs of each
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}[part] if is_swapped else part
