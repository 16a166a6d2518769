"""Checkpoints of transformers as GGUF files, written by the format's own library as llama.cpp's converter does.

Names of tensors are those of the library's tables. A family says what its converter does beside that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmstack_model_files import read_model_config, resolve_model
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.models.choice import choose_model_class
from llmstack_model_runner.weights import load_weights
from model_runner_helpers.gguf_models import add_tokenizer, gguf
from model_runner_helpers.paged_harness import PagedHarness

transformers = pytest.importorskip("transformers")

Converted = Iterable[tuple[str, torch.Tensor]]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_PLAIN = (
    "ffn_gate_inp.weight", "ffn_gate_inp.scale", "ssm_conv1d.weight", "conv1d_q.weight", "conv1d_k.weight",
    "conv1d_v.weight", "ssm_a", "ssm_d", "norm.weight",
)  # fmt: skip


def _as_it_is(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    yield name, tensor


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, and what its converter does.

    Attributes:
        architecture: Name in files.
        name: That of the class in transformers, without `ForCausalLM`.
        values: Of its configuration.
        metadata: Writes the keys that not all families have.
        convert: A tensor of a repository as what the file has, under names of repositories or of files.
        extra: Tensors that no repository has.
        table: The architecture whose names of tensors the library has, where it does not know this one.
    """

    architecture: str
    name: str
    values: Mapping[str, Any]
    metadata: Callable[[Any, Any], None] = lambda writer, config: None
    convert: Callable[[str, torch.Tensor, Any], Converted] = field(default=_as_it_is)
    extra: Callable[[Any], dict[str, torch.Tensor]] = lambda config: {}
    table: str = ""


def make_model(family: Family) -> Any:
    """The model with random weights, none of which is 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.name}Config")(**family.values)
    name = family.name.removesuffix("Text")
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for own, parameter in model.state_dict(keep_vars=True).items():
            if own.endswith(("bias", "norm.weight", "norm_1.weight", "norm_2.weight", "scale", "scalar")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors_of(family: Family, model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file in full precision, by their names in it."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == (family.table or family.architecture)
    )
    names = gguf.get_tensor_name_map(architecture, 64)
    found = family.extra(model.config)
    experts: dict[str, dict[int, torch.Tensor]] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        own = name if name.startswith(("blk.", "rope_")) else names.get_name(name, (".weight", ".bias"))
        if own is None:
            raise ValueError(f"the library has no name for {name}")
        found[own] = tensor

    for name, tensor in load_file(folder / "model.safetensors").items():
        for part, converted in family.convert(name, tensor, model.config):
            if one := _EXPERT.fullmatch(part):
                experts.setdefault(f"{one[1]}.{one[3]}.{one[4]}", {})[int(one[2])] = converted
            else:
                put(part, converted)
    for name, by_number in experts.items():
        put(name.replace(".experts.all.", "."), torch.stack([by_number[number] for number in sorted(by_number)]))
    return found


def write_file(path: Path, family: Family, config: Any, tensors: Mapping[str, torch.Tensor], kind: str = "F32") -> None:
    """A file whose matrices are of the type `kind`, where their rows have whole blocks."""
    logging.getLogger("gguf").setLevel(logging.ERROR)  # keys that a family writes again are not worth a line
    writer = gguf.GGUFWriter(path, family.architecture)
    _add_common(writer, config)
    family.metadata(writer, config)
    add_tokenizer(writer)
    # llama.cpp reads no file without merges, and names whole characters alone.
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", *(f"<{number}>" for number in range(config.vocab_size - 5))])
    writer.add_token_merges(["a b"])
    for name, tensor in tensors.items():
        if is_rounded(name, tensor, kind):
            own = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), own), raw_dtype=own)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loaded(path: Path) -> PagedHarness:
    """The model of a file in float32, with exact inputs of its layers."""
    folder = resolve_model(str(path))
    config = read_model_config(folder, {})  # with the defaults of the family
    model: Any = choose_model_class(config["architectures"][0])(config, torch.float32, torch.device("cpu"))
    load_weights(model, folder, dtype=torch.float32, checkpoint_format=read_format(config))
    return PagedHarness(model, torch.float32)


def is_rounded(name: str, tensor: torch.Tensor, kind: str) -> bool:
    """Whether a file of this type has the tensor in it."""
    block_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return kind != "F32" and tensor.ndim > 1 and not name.endswith(_PLAIN) and tensor.shape[-1] % block_size == 0


def rounded(name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What the tensor of a file of this type means, in float32."""
    if not is_rounded(name, tensor, kind):
        return tensor
    own = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), own), own)).view(tensor.shape)


def _add_common(writer: Any, config: Any) -> None:
    """The keys that llama.cpp's converter writes for every family that has them."""
    values = config.to_dict()  # some attributes differ by layer, and cannot be asked for
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    for name, add in (
        ("num_attention_heads", writer.add_head_count),
        ("num_key_value_heads", writer.add_head_count_kv),
        ("intermediate_size", writer.add_feed_forward_length),
        ("head_dim", writer.add_key_length),
        ("head_dim", writer.add_value_length),
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("layer_norm_epsilon", writer.add_layer_norm_rms_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        value = values.get(config.attribute_map.get(name, name))
        if isinstance(value, int | float) and not isinstance(value, bool):
            add(value)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
