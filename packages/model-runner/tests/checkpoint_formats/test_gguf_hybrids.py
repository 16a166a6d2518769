"""GGUF files of models with states, as llama.cpp's converter writes them. All three compute the same."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.gguf_checkpoints import loaded
from model_runner_helpers.gguf_models import add_tokenizer, gguf
from model_runner_helpers.llama_cpp import llama_cpp_tokens
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_files import ModelFilesError, resolve_model
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
GRANITE = SIZES | MAMBA | {
    "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 96, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 4.0, "num_experts_per_tok": 2,
}  # fmt: skip
LFM2 = SIZES | {
    "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
}  # fmt: skip
NEMOTRON = SIZES | {
    "head_dim": 16, "layers_block_type": ["mamba", "mlp", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "time_step_min": 1e-9, "time_step_floor": 0.1,
}  # fmt: skip
EXPERTS = {
    "layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("lfm2", "Lfm2", {name: value for name, value in LFM2.items() if "expert" not in name}),
    "lfm2 with experts": ("lfm2moe", "Lfm2Moe", LFM2),
    "granite 4 h": ("granitehybrid", "GraniteMoeHybrid", GRANITE | {"num_local_experts": 0}),
    "granite 4 h with experts": (
        "granitehybrid", "GraniteMoeHybrid", GRANITE | {"num_local_experts": 4, "intermediate_size": 32}),
    "falcon h1": ("falcon-h1", "FalconH1", SIZES | MAMBA | {
        "mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8], "key_multiplier": 0.6, "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6, "attention_in_multiplier": 0.9, "mlp_multipliers": [0.8, 0.4],
        "attention_out_multiplier": 0.7, "embedding_multiplier": 4.0, "lm_head_multiplier": 0.5}),
    "nemotron h": ("nemotron_h", "NemotronH", NEMOTRON),
    "nemotron 3": ("nemotron_h_moe", "NemotronH", NEMOTRON | EXPERTS),
    "nemotron 3 with latents": ("nemotron_h_moe", "NemotronH", NEMOTRON | EXPERTS | {"moe_latent_size": 32}),
    "mamba 2": ("mamba2", "Mamba2", {
        "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16,
        "n_groups": 2, "chunk_size": 16, "initializer_range": 0.2}),
}  # fmt: skip
QWEN = {name: value for name, value in SIZES.items() if name != "initializer_range"} | {
    "initializer_range": 0.1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FAMILIES |= {
    "qwen 3.5": ("qwen35", "Qwen3_5Text", {name: value for name, value in QWEN.items() if "expert" not in name}),
    "qwen 3.5 with experts": (
        "qwen35moe",
        "Qwen3_5MoeText",
        {name: QWEN[name] for name in QWEN if "interm" not in name[:6]},
    ),
}
# Parts of names, longest first where one has another.
NAMES = {
    "backbone.embeddings": "token_embd", "model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm",
    "backbone.norm_f": "output_norm", "model.final_layernorm": "output_norm", "model.norm": "output_norm",
    "lm_head": "output", "backbone.layers": "blk", "model.layers": "blk", "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.o_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.expert_bias": "exp_probs_b.bias", "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "mixer.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp", "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up", "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.": "mixer.", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate.": "ffn_gate_inp.", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mamba.": "mixer.", "mixer.in_proj": "ssm_in", "mixer.out_proj": "ssm_out", "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm", "mixer.dt_bias": "ssm_dt.bias", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d",
}  # fmt: skip


SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
EXPERTS_OF = {"w1": "gate", "w3": "up", "w2": "down"} | {f"{own}_proj": own for own in ("gate", "up", "down")}


def make_model(family: str) -> Any:
    _, name, values = FAMILIES[family]
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = model_class(getattr(transformers, f"{name}Config")(**values)).eval()
    with torch.no_grad():
        for own, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if own.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """A repository's tensors under the names and in the forms of a file."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    config = model.config
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        place, _, part = name.partition(".experts.")
        if part in ("gate_up_proj", "down_proj"):
            stem = f"blk.{place.split('.')[2]}.ffn_"
            owns = ("gate", "up") if part == "gate_up_proj" else ("down",)
            found |= {
                f"{stem}{own}_exps.weight": one for own, one in zip(owns, tensor.chunk(len(owns), 1), strict=True)
            }
            continue
        if part:
            number, _, part = part.partition(".")
            own = EXPERTS_OF[part.partition(".")[0]]
            experts.setdefault(f"blk.{place.split('.')[2]}.ffn_{own}_exps.weight", []).append((int(number), tensor))
            continue
        if config.model_type == "falcon_h1":
            tensor = folded(name, tensor, config)
        if "shared_mlp" in name or "linear.weight" in name:
            found |= parts_of_granite(name, tensor, bool(config.num_local_experts))
            continue
        if config.model_type.startswith("qwen3_5"):
            tensor = of_qwen(name, tensor, config)
            name = name.replace("post_attention_layernorm", "post_attention_norm")
        for old, new in NAMES.items():
            name = name.replace(old, new)
        name = re.sub(r"(blk\.\d+\.)norm\.", r"\1attn_norm.", name)
        if name.endswith("ssm_norm.weight") and "qwen" not in config.model_type:
            tensor = tensor.view(2, -1)
        elif name.endswith(("conv1d.weight", "shortconv.conv.weight")):
            tensor = tensor.squeeze(1)
        elif name.endswith(".ssm_a"):
            tensor = -tensor.exp() if "qwen" in config.model_type else -tensor.exp()[:, None]
        elif name.endswith(".ssm_d"):
            tensor = tensor[:, None]
        elif config.model_type == "falcon_h1":
            name = name.replace("ffn_norm.weight", "ffn_norm")
        found[name] = tensor
    return found | {name: torch.stack([one for _, one in sorted(all_of, key=lambda each: each[0])])
                    for name, all_of in experts.items()}  # fmt: skip


def of_qwen(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Norms with 1 added, value heads in turns, and the gate of the shared expert as a row."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor.flatten()
    num_keys, group, size = config.linear_num_key_heads, 3, config.linear_value_head_dim
    turns = torch.arange(num_keys * group).view(num_keys, group).t().flatten()
    values = (turns[:, None] * size + torch.arange(size)).flatten()
    first = 2 * num_keys * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:first], tensor[first:][values]))
    if "in_proj_z" in name:
        return tensor[values]
    if "linear_attn.out_proj" in name:
        return tensor[:, values].contiguous()
    return tensor[turns] if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")) else tensor


def parts_of_granite(name: str, tensor: torch.Tensor, has_experts: bool) -> dict[str, torch.Tensor]:
    kind = ("_shexp" if has_experts else "") if "shared_mlp" in name else "_exps"
    place = f"blk.{name.split('.')[2]}.ffn_"
    if "output_linear" in name:
        return {f"{place}down{kind}.weight": tensor}
    return {f"{place}{own}{kind}.weight": half for own, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True)}


def folded(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """The weight times the factors of Falcon-H1."""
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down, "gate_proj": gate, "q_proj": config.attention_in_multiplier,
        "k_proj": config.key_multiplier * config.attention_in_multiplier, "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    if "in_proj" in name:
        inner, rows = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = tensor.split([inner, inner, rows, rows, config.mamba_n_heads])
        scaled = [part * factor for part, factor in zip(parts, config.ssm_multipliers, strict=True)]
        return torch.cat(scaled) * config.ssm_in_multiplier
    return tensor * next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)


def write_file(path: Path, architecture: str, config: Any, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """Matrices in the type `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["hybrid"] * num_layers
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(num_layers)
    epsilon = next(value for value in (getattr(config, name, None) for name in (
        "norm_eps", "rms_norm_eps", "layer_norm_epsilon")) if value is not None)  # fmt: skip
    writer.add_layer_norm_rms_eps(epsilon)
    if architecture.startswith("nemotron"):
        writer.add_layer_norm_eps(epsilon)
    if architecture == "mamba2":
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
    else:
        has_attention = [one in ("full_attention", "hybrid") for one in kinds]
        writer.add_head_count(4)
        is_even = all(has_attention) or architecture.startswith("qwen35")
        writer.add_head_count_kv(2 if is_even else [2 * has for has in has_attention])
        inner = getattr(config, "intermediate_size", 0)
        writer.add_feed_forward_length([0, inner, 0] if architecture.startswith("nemotron") else inner)
        writer.add_key_length(16)
        rope = getattr(config, "rope_parameters", None) or {}
        writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif architecture.startswith("qwen35"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_rope_dimension_count(4)
        writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_full_attention_interval(2)
    else:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
        writer.add_ssm_group_count(2)
    if architecture == "granitehybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_scaling_finetuned(False)
    if any("_exps" in name for name in tensors):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
        writer.add_leading_dense_block_count(getattr(config, "num_dense_layers", 0))
        writer.add_expert_weights_scale(getattr(config, "routed_scaling_factor", 1.0))
        writer.add_expert_shared_feed_forward_length(next((
            value for value in (getattr(config, name, None) for name in SHARED) if value), 0))  # fmt: skip
    if architecture == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "nemotron_h_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_group_count(1)
        writer.add_expert_group_used_count(1)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)
    add_tokenizer(writer)
    # llama.cpp reads no file without merges, and names whole characters alone.
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", *(f"<{number}>" for number in range(config.vocab_size - 5))])
    writer.add_token_merges(["a b"])
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in tensors.items():
        if is_matrix(name, tensor) and kind != "F32":
            own = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), own), raw_dtype=own)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Whether files have it in few bits."""
    plain = ("ssm_norm.weight", "conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d", "ffn_gate_inp.weight")
    return tensor.ndim > 1 and not name.endswith(plain)


def rounded(tensor: torch.Tensor, own: Any) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), own), own)).view(tensor.shape)


def logits_of(path: Path) -> torch.Tensor:
    folder = resolve_model(str(path))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = load_model_class(config["architectures"][0])(config, torch.float32, torch.device("cpu"))
    load_weights(model, folder, dtype=torch.float32, checkpoint_format=read_format(config))
    return PagedHarness(model, torch.float32).step([("a", PROMPT)])  # type: ignore[arg-type]  # it is a decoder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "family", [name if name == "granite 4 h" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_a_file_computes_what_its_repository_does(family: str, tmp_path: Path) -> None:
    architecture, model = FAMILIES[family][0], make_model(family)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    tensors = tensors_of(model, tmp_path / "repository")
    write_file(tmp_path / "plain.gguf", architecture, model.config, tensors, "F32")
    assert (logits_of(tmp_path / "plain.gguf") - expected).abs().max() <= 2e-5 * expected.abs().max()

    write_file(tmp_path / "few.gguf", architecture, model.config, tensors, "Q8_0")
    own = gguf.GGMLQuantizationType.Q8_0
    meant = {
        name: rounded(tensor, own) if is_matrix(name, tensor) else tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    write_file(tmp_path / "meant.gguf", architecture, model.config, meant, "F32")
    wanted = logits_of(tmp_path / "meant.gguf")
    assert (logits_of(tmp_path / "few.gguf") - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert not torch.allclose(wanted, expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_writes_the_same_tokens(family: str, tmp_path: Path) -> None:
    model, path = make_model(family), tmp_path / "model.gguf"
    write_file(path, FAMILIES[family][0], model.config, tensors_of(model, tmp_path / "repository"), "F32")
    harness, steps = loaded(path), llama_cpp_tokens(path, PROMPT, 8)
    assert [next(iter(step)) for step in steps] == harness.greedy(PROMPT, 8)
    ours = harness.step([("a", PROMPT)])[-1].log_softmax(-1)
    assert max(abs(float(ours[token]) - value) for token, value in steps[0].items()) <= 1e-4


def test_bamba_in_a_file_is_refused(tmp_path: Path) -> None:
    """It is of the same architecture, and rotates a part of each head."""
    torch.manual_seed(0)
    values = GRANITE | {"num_local_experts": 0}
    model = transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**values))
    tensors = tensors_of(model, tmp_path / "repository")
    path = tmp_path / "bamba.gguf"
    add = gguf.GGUFWriter.add_rope_scaling_finetuned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_rope_scaling_finetuned", lambda writer, value: add(writer, True))
        write_file(path, "granitehybrid", model.config, tensors, "F32")
    with pytest.raises(ModelFilesError, match="rotation of heads is not supported"):
        resolve_model(str(path))
