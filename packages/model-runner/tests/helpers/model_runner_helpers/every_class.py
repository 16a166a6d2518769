"""Every causal language model of transformers, tiny, through the backend: exact, or refused with a reason."""

from __future__ import annotations

import contextlib
import inspect
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.models.transformers_backend.model import TransformersModel
from llmstack_model_runner.models.transformers_backend.resolve import UnsupportedByTransformersError
from llmstack_model_runner.weights import load_weights
from model_runner_helpers.paged_harness import PagedHarness

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
NUM_OUTPUT_TOKENS = 6
TOLERANCE = 5e-5  # of the largest logit: deep loops of a layer add up what is 2e-5 elsewhere
NATIVE, EXACT = "native code", "exact"
_MAX_PARAMETERS = 3_000_000

# Sizes under all names that configurations have; each class takes those that it knows.
_SIZES: dict[str, Any] = {
    "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "n_embd": 32, "d_model": 32,
    "word_embed_proj_dim": 32, "hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4,
    "n_layers": 4, "decoder_layers": 2, "encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 40, "ffn_dim": 40, "d_ff": 40, "decoder_ffn_dim": 40, "encoder_ffn_dim": 40,
    "max_position_embeddings": 64, "n_positions": 64, "max_target_positions": 64, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 4,
    "sliding_window": 7, "global_head_dim": 16, "num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_LATENT = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
_CLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
         "patch_size": 14}  # fmt: skip
_SOUND = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 4,
          "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}  # fmt: skip
_STAGE = {"vocab_size": 97, "hidden_size": 32, "hidden_size_global": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 64}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": _LATENT,
    "AXK2ForCausalLM": _LATENT,
    "BambaForCausalLM": _MAMBA,
    "BltForCausalLM": {
        "encoder_config": _STAGE, "decoder_config": _STAGE, "patcher_config": _STAGE,
        "global_config": _STAGE | {"hidden_size": 64}, "encoder_hash_byte_group_vocab": 97,
    },
    "CohereCompassForCausalLM": {
        "layer_types": _ALTERNATE, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "Dots3NoteForCausalLM": {
        "num_key_value_heads": 4, "head_dim": 16, "index_head_dim": 16, "index_n_heads": 2,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 12, "swa_kv_lora_rank": 20,
        "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 12, "shared_experts_intermediate_size": 24,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma4ForCausalLM": {"attention_k_eq_v": True, "num_kv_shared_layers": 2, "layer_types": _ALTERNATE},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
            "num_kv_shared_layers": 2, "layer_types": _ALTERNATE[:2], "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "intermediate_size": 40,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
    },
    "GitForCausalLM": {"vision_config": _CLIP},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GlmMoeDsaForCausalLM": _LATENT,
    "GraniteMoeHybridForCausalLM": _MAMBA,
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 97},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 97},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "LongcatFlashForCausalLM": _LATENT,
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "MiniCPM3ForCausalLM": _LATENT,
    "Phi4MultimodalForCausalLM": {"vision_config": _CLIP, "audio_config": _SOUND},
    "RoCBertForCausalLM": {
        "pronunciation_vocab_size": 97, "shape_vocab_size": 97, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "YoutuForCausalLM": _LATENT,
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}  # fmt: skip


def architectures() -> list[str]:
    """The classes, each once."""
    values = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value)}
    return sorted(name for name in names if hasattr(transformers, name))


def verdict(architecture: str) -> str:
    """`native code`, `exact`, or the reason of the refusal. Native classes run through the backend too.

    Raises:
        AssertionError: Tokens or logits differ from those of transformers.
    """
    found = _by_transformers(architecture)
    return NATIVE if architecture in ARCHITECTURES else found


def _by_transformers(architecture: str) -> str:
    model_class = getattr(transformers, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = small_config(model_class.config_class, _OVERRIDES.get(architecture, {}))
        values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
        try:
            TransformersModel(values, torch.float32, torch.device("cpu"))
            return _compare(model_class, config)
        except UnsupportedByTransformersError as error:
            return str(error).partition(": ")[2].removesuffix(".").replace("|", "/")


def small_config(config_class: Any, changes: dict[str, Any]) -> Any:
    """A configuration of a class with few layers and narrow ones."""
    known = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "attribute_map", {})}
    with contextlib.suppress(TypeError, ValueError, AttributeError, StrictDataclassError):  # some have no defaults
        known |= {*config_class().to_dict()}
    return config_class(**{name: value for name, value in _SIZES.items() if name in known} | changes)


def _compare(model_class: Any, config: Any) -> str:
    model = random_model(model_class, config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        values = json.loads((Path(folder) / "config.json").read_text())
        paged = TransformersModel(values, torch.float32, torch.device("cpu"))
        load_weights(paged, folder)
        # What transformers itself reads from the files: of some classes that is not what was saved.
        model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    tokens, logits = _greedy(model)
    harness, pieces = PagedHarness(paged, torch.float32), (tokens[:7], tokens[7:16], tokens[16:])
    found = torch.cat([harness.step([("a", piece)]) for piece in pieces])
    error = float((found - logits).abs().max() / logits.abs().max())
    assert error <= TOLERANCE, f"{model_class.__name__}: logits differ by {error:.1e} of the largest"
    assert harness.greedy(PROMPT, NUM_OUTPUT_TOKENS, "b") == [*tokens[len(PROMPT) :], int(logits[-1].argmax())]
    return EXACT


def random_model(model_class: Any, config: Any) -> Any:
    """A model with weights that make a difference, biases included.

    Raises:
        ValueError: It has too many of them.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class._from_config(config).parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(f"{model_class.__name__} has {num_parameters} parameters")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                is_gain = parameter.ndim == 1 and name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(is_gain), std=0.1 if parameter.ndim == 1 else 0.2)
    return model


def _greedy(model: Any) -> tuple[list[int], torch.Tensor]:
    """The prompt with all tokens but the last one behind it, and the logits of these, computed without a cache."""
    tokens = list(PROMPT)
    for _ in range(NUM_OUTPUT_TOKENS):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        if len(tokens) - len(PROMPT) < NUM_OUTPUT_TOKENS - 1:
            tokens.append(int(logits[-1].argmax()))
    return tokens, logits


def table(verdicts: dict[str, str], not_built: frozenset[str] = frozenset()) -> str:
    """Rows of classes with the same result, the exact ones first."""
    results: dict[str, list[str]] = {}
    for architecture, result in sorted(verdicts.items()):
        results.setdefault(result, []).append(f"`{architecture}`")
    rows = [f"| result with transformers {transformers.__version__} | number | classes |", "|---|---|---|"]
    ordered = sorted(
        results.items(), key=lambda item: (not item[0].startswith((NATIVE, EXACT)), -len(item[1]), item[0])
    )
    rows += [f"| {result} | {len(names)} | {', '.join(names)} |" for result, names in ordered]
    if not_built:
        rows.append(f"| not tried: no tiny configuration is known | {len(not_built)} | {_words(not_built)} |")
    return "\n".join(rows) + "\n"


def _words(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
