"""Repository names of GGUF tensors, and changes of their numbers' order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmstack_gguf.dense import DENSE, OLMO_3, has_windows
from llmstack_gguf.gemma3n import GEMMA_3N
from llmstack_gguf.gemma4 import GEMMA_4
from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.latent import DEEPSEEK_V2, LATENT, is_softmax
from llmstack_gguf.layer_names import LLAMA, Architecture
from llmstack_gguf.mixtures import MIXTURES
from llmstack_gguf.selective import FALCON_MAMBA, SELECTIVE, is_normalised
from llmstack_gguf.tensor_names import DECODERS, FALCON_OF_TWO_NORMS, MIXTRAL

ARCHITECTURES: Mapping[str, Architecture] = {
    **DECODERS,
    **DENSE,
    "gemma3n": GEMMA_3N,
    "gemma4": GEMMA_4,
    **MIXTURES,
    **LATENT,
    **SELECTIVE,
}
CLASS_NAMES = frozenset(
    entry.class_name for entry in (*ARCHITECTURES.values(), MIXTRAL, DEEPSEEK_V2, FALCON_MAMBA, OLMO_3)
)
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+(?:\.[a-z0-9_]+)?)\.(weight|bias|scale)")
_BARE = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+)()")  # without `.weight`
_ROTATIONS = "attn_rot_embd"
"""Frequencies in each layer of older files, which follow from the metadata."""
_EXPERTS = "_exps"
_GATES_AND_UPS, _GATES, _UPS = "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps"
_MAX_EXPERTS = 4096


class Target(NamedTuple):
    """The target of a tensor of a file.

    Attributes:
        names: The name of each part in repositories.
        is_experts: Its parts are experts; otherwise it is one part.
        has_interleaved_heads: Its rows must be put into order for RoPE by halves.
        is_offset: 1 is subtracted, as repositories store it.
        is_transposed: Repositories store it the other way around.
        qkv_heads: Numbers of heads of queries, and of keys and values, by which its rows must be grouped.
        is_stack: Repositories have all experts in one tensor too.
        partner: Tensor of the file that is a part of it: its rows follow those of this one in turns, unless the form
            says otherwise.
        form: How repositories have it, where it is otherwise in the file: `flat` is one row of numbers, `log of
            negative` the logarithms of their negatives too, `logs` the same with the shape of the file, `wide logs`
            [1, 1, numbers, 1], `taps` those of a convolution, [channels, 1, length], and `row` a matrix of one row.
            `products` are two tensors with the products of keys and of values of each head, as one matrix.
    """

    names: tuple[str, ...]
    is_experts: bool = False
    has_interleaved_heads: bool = False
    is_offset: bool = False
    is_transposed: bool = False
    qkv_heads: tuple[int, int] | None = None
    is_stack: bool = False
    partner: str = ""
    form: str = ""


def architecture_of(header: Header) -> Architecture:
    """The architecture of a file, as repositories name it.

    Raises:
        GGUFError: It is not supported.
    """
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise GGUFError(
            f"the architecture {header.architecture[:64]!r} is not supported as GGUF; {', '.join(ARCHITECTURES)} are."
        )
    if header.architecture == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors:
        return FALCON_OF_TWO_NORMS
    if header.architecture == "deepseek2" and is_softmax(header):
        return DEEPSEEK_V2
    if header.architecture == "olmo2" and has_windows(header):
        return OLMO_3
    if header.architecture == "mamba" and is_normalised(header):
        return FALCON_MAMBA
    return MIXTRAL if found is LLAMA and header.metadata.get("llama.expert_count") else found


def target_of(header: Header, name: str) -> Target:
    """The target of a tensor, by its name in the file.

    Raises:
        GGUFError: The architecture has no such tensor, its shape is not that of experts, or what it belongs to is not
            there.
    """
    architecture, shape = architecture_of(header), header.tensors[name].shape
    layer = _LAYER.fullmatch(name) or _BARE.fullmatch(name)
    if layer is not None and int(layer[1]) >= num_layers_of(header):
        return Target(())  # a layer that predicts several tokens
    if layer is not None and (stack := _stack_of(header, architecture, layer)) is not None:
        return stack
    if layer is None or not _names_of(architecture, layer[2]):
        is_left_out = layer is not None and layer[2] == _ROTATIONS
        return Target(()) if is_left_out else _outer_target(header, architecture, name)
    number, part, kind = layer.groups()
    names = [f"{architecture.layers}{number}.{own}.{kind}" for own in _names_of(architecture, part)]
    if part.endswith(_EXPERTS):
        if len(shape) != 3 or shape[0] > _MAX_EXPERTS or shape[1] % len(names):
            raise GGUFError(f"{name[:128]} has the shape {list(shape)[:4]}, which is not that of experts.")
        return Target(tuple(own.format(expert) for expert in range(shape[0]) for own in names), is_experts=True)
    return Target(
        (names[0],),
        has_interleaved_heads=architecture.interleaves_heads and part in ("attn_q", "attn_k"),
        is_offset=architecture.has_offset_norms and part.endswith("_norm"),
        is_transposed=architecture.is_transposed and len(shape) == 2,
        qkv_heads=_heads_of(header, name) if architecture.groups_heads and part == "attn_qkv" else None,
        form=architecture.forms.get(f"{part}.{kind}", ""),
    )


def _outer_target(header: Header, architecture: Architecture, name: str) -> Target:
    """The target of a tensor that is outside of the layers."""
    part, _, kind = name.rpartition(".")
    shape = header.tensors[name].shape
    named = f"{architecture.ends[part]}.{kind}" if part in architecture.ends else ""
    if (named or name).endswith(("_scale", ".scale")):
        raise GGUFError(f"{name[:128]} scales a tensor in a way that is not supported.")
    if not named:
        raise GGUFError(f"{name[:128]} is not known in {header.architecture}, and may change answers.")
    if "{}" not in named:
        return Target((named,), is_offset=part == "output_norm" and architecture.has_offset_norms)
    if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
        raise GGUFError(f"{name[:128]} has the shape {list(shape)[:4]}, which is not that of several matrices.")
    return Target(tuple(named.format(number) for number in range(shape[0])), is_experts=True)


def num_layers_of(header: Header) -> int:
    """Layers of the model itself: those behind them predict several tokens. All numbers where the file does not say."""
    count = header.metadata.get(f"{header.architecture}.block_count")
    further = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    return count - further if type(count) is int and type(further) is int and further else 1 << 32


def _names_of(architecture: Architecture, part: str) -> Sequence[str]:
    """The names of what a tensor of a layer has, in turns for each expert; none for an unknown tensor."""
    if part == _GATES_AND_UPS and _GATES in architecture.layer:
        return architecture.layer[_GATES], architecture.layer[_UPS]
    return (architecture.layer[part],) if part in architecture.layer else ()


def _stack_of(header: Header, architecture: Architecture, layer: re.Match[str]) -> Target | None:
    """The target of a tensor with a name of its own; None where there is none."""
    number, part, kind = layer.groups()
    key = f"{part}.{kind}" if kind else part
    if key in architecture.partners.values():
        return Target(())  # it comes with its partner
    if key not in architecture.layer or (key == part and kind):
        return None
    partner = f"blk.{number}.{architecture.partners[key]}" if key in architecture.partners else ""
    form = architecture.forms.get(key, "")
    if partner and form == "products":
        _check_products(header, layer[0], partner)
    elif partner and (partner not in header.tensors or _kind_of(header, partner) != _kind_of(header, layer[0])):
        raise GGUFError(f"{layer[0]} and {partner[:128]} are not of the same shape and type.")
    named = f"{architecture.layers}{number}.{architecture.layer[key]}"
    return Target((named,), is_stack=part.endswith(_EXPERTS) and kind != "scale", partner=partner, form=form)


def _check_products(header: Header, keys: str, values: str) -> None:
    """Products of latents: those of keys are [heads, rank, numbers], and those of values [heads, numbers, rank]."""
    shape, other = header.tensors[keys].shape, header.tensors[values].shape if values in header.tensors else ()
    if len(shape) != 3 or len(other) != 3 or (shape[0], shape[1]) != (other[0], other[2]):
        raise GGUFError(f"{keys[:128]} and {values[:128]} are not products of the same heads and latents.")


def _kind_of(header: Header, name: str) -> tuple[tuple[int, ...], str]:
    info = header.tensors[name]
    return info.shape, info.type.name


def _heads_of(header: Header, name: str) -> tuple[int, int]:
    heads = header.metadata.get(f"{header.architecture}.attention.head_count")
    shared = header.metadata.get(f"{header.architecture}.attention.head_count_kv", heads)
    num_rows = header.tensors[name].shape[0]
    if type(heads) is not int or type(shared) is not int or shared < 1 or heads % shared:
        raise GGUFError(f"{heads} heads cannot share {shared} heads of keys and values.")
    if num_rows % (heads + 2 * shared):
        raise GGUFError(f"{name[:128]} has {num_rows} rows, which are not those of {heads} and {shared} heads.")
    return heads, shared
