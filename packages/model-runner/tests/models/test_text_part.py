"""Models with parts for images or sound, in the form of the hub: their text model computes what transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from safetensors.torch import save_file

from llmstack_model_files import read_model_config
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.weights import load_weights, read_served_config
from llmstack_types import ModelRunnerConfig

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71], [5], [9, 8, 7]]
NUM_NEW_TOKENS = 16
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32,
               "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "num_position_embeddings": 16,
               "deepstack_visual_indexes": [0]}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "projection_dim": 32}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 4, "image_size": 28, "patch_size": 14}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
M_ROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
M_ROPE_3 = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1, "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0}  # fmt: skip
# The fields of published configurations of Qwen 3.5.
DELTA_NETS = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "attn_output_gate": True, "attention_bias": False, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [1, 1, 0], "mrope_interleaved": True},
}  # fmt: skip
# The fields of published configurations of Gemma 4, which are null where they have no meaning.
GEMMA4 = {
    "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": None,
    "sliding_window": 7, "attention_k_eq_v": False, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    "num_experts": None,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": False, "initializer_range": 0.05,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA4_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64}  # fmt: skip
DOTS = TEXT | {
    "model_type": "dots3_note", "num_key_value_heads": 4, "num_hidden_layers": 6, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 16, "rope_theta": 8e7, "swa_rope_theta": 5e4, "use_dsa": True,
    "sliding_window_size": 9, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 20, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 12, "index_topk": 2048,
    "index_head_dim": 16, "index_n_heads": 2, "norm_topk_prob": True, "tie_word_embeddings": False,
    "vision_config": {"embed_dim": 32, "num_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32,
                      "pyramid_num_routed": [-1], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "audio_config": {"downsample_hidden_size": 8, "whisper_adapter_in_dim": 32, "whisper_adapter_out_dim": 32,
                     "whisper_config": {"d_model": 32, "encoder_attention_heads": 4, "encoder_layers": 1,
                                        "encoder_ffn_dim": 32, "num_mel_bins": 16, "max_source_positions": 32}},
}  # fmt: skip
Rename = Callable[[str], str]


def whole(text: dict[str, Any], vision: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"text_config": TEXT | text, "vision_config": vision, "vision_feature_layer": -1, **others}


def before_language_model(name: str) -> str:
    """`language_model.model.layers.0…`, `vision_tower.…`: as most such repositories name their tensors."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1) if name.startswith("language_model.") else name


def of_qwen_2_vl(name: str) -> str:
    """`model.layers.0…` and `visual.…`."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def of_dots(name: str) -> str:
    """`model.layers.0…`, `vision_encoder.…` and `audio_encoder.…`."""
    name = name.replace("model.language_model.", "model.", 1).replace("model.audio_tower.", "audio_encoder.", 1)
    return name.replace("model.vision_tower.", "vision_encoder.", 1)


def as_it_is(name: str) -> str:
    return name


# The class, its configuration as repositories have it, and their names of tensors.
CASES: dict[str, tuple[str, dict[str, Any], Rename]] = {
    "mistral 3": (
        "Mistral3",
        whole({"model_type": "mistral", "head_dim": 8, "sliding_window": None, "rope_theta": 1e9}, PIXTRAL),
        before_language_model,
    ),
    "mistral 3 of ministral 3, tied": (
        "Mistral3",
        whole({"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN}, PIXTRAL),
        before_language_model,
    ),
    "qwen 2 vl, whose fields are not apart": (
        "Qwen2VL",
        TEXT | {"model_type": "qwen2_vl", "rope_theta": 1e6, "rope_scaling": M_ROPE, "use_sliding_window": False,
                "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 14}},
        of_qwen_2_vl,
    ),
    "qwen 2.5 vl, whose fields are not apart": (
        "Qwen2_5_VL",
        TEXT | {"model_type": "qwen2_5_vl", "rope_theta": 1e6, "rope_scaling": M_ROPE, "tie_word_embeddings": True,
                "vision_config": QWEN_VISION},
        of_qwen_2_vl,
    ),
    "dots 3 note, whose fields are not apart": ("Dots3Note", DOTS, of_dots),
    "qwen 3 vl": (
        "Qwen3VL",
        whole({"model_type": "qwen3_vl_text", "head_dim": 16, "rope_theta": 5e6, "rope_scaling": M_ROPE_3,
               "attention_bias": False, "tie_word_embeddings": True}, QWEN_VISION, tie_word_embeddings=True),
        as_it_is,
    ),
    "qwen 3 vl with experts": (
        "Qwen3VLMoe",
        whole({"model_type": "qwen3_vl_moe_text", "head_dim": 16, "rope_theta": 5e6, "rope_scaling": M_ROPE_3,
               "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
               "mlp_only_layers": [], "decoder_sparse_step": 1}, QWEN_VISION, tie_word_embeddings=False),
        as_it_is,
    ),
    # What transformers does not turn round, since it has the shape of its own order already.
    "qwen 3 vl with square experts": (
        "Qwen3VLMoe",
        whole({"model_type": "qwen3_vl_moe_text", "head_dim": 16, "rope_theta": 5e6, "rope_scaling": M_ROPE_3,
               "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
               "mlp_only_layers": [], "decoder_sparse_step": 1}, QWEN_VISION, tie_word_embeddings=False),
        as_it_is,
    ),
    "qwen 3.5": (
        "Qwen3_5",
        whole(DELTA_NETS | {"model_type": "qwen3_5_text"}, QWEN_VISION, tie_word_embeddings=False),
        as_it_is,
    ),
    "qwen 3.5 with experts": (
        "Qwen3_5Moe",
        whole(DELTA_NETS | {"model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2,
              "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}, QWEN_VISION,
              tie_word_embeddings=False),
        as_it_is,
    ),
    "gemma 4": (
        "Gemma4",
        {"text_config": TEXT | GEMMA4 | {"model_type": "gemma4_text"}, "vision_config": GEMMA4_VISION,
         "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 32,
                          "subsampling_conv_channels": [8, 4]}},
        as_it_is,
    ),
    "gemma 4 unified": (
        "Gemma4Unified",
        {"text_config": TEXT | GEMMA4 | {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 0}},
        as_it_is,
    ),
    "internvl": (
        "InternVL",
        whole({"model_type": "qwen2", "rope_theta": 1e6}, {"hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": [28, 28], "patch_size": [14, 14]}),
        before_language_model,
    ),
    "llava": ("Llava", whole({"model_type": "llama"}, CLIP), before_language_model),
    "llava of mistral, as pixtral": ("Llava", whole({"model_type": "mistral", "head_dim": 16}, PIXTRAL),
                                     before_language_model),
    "llava next": ("LlavaNext", whole({"model_type": "mistral"}, CLIP), before_language_model),
    "llava onevision": (
        "LlavaOnevision", whole({"model_type": "qwen2"}, SIGLIP, tie_word_embeddings=True), before_language_model,
    ),
    "gemma 3": (
        "Gemma3",
        whole({"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16,
               "initializer_range": 0.1}, SIGLIP, mm_tokens_per_image=4),
        before_language_model,
    ),
    "smolvlm": ("SmolVLM", whole({"model_type": "llama"}, {"hidden_size": 32, "intermediate_size": 32,
                "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}), as_it_is),
    "voxtral": (
        "Voxtral",
        {"text_config": TEXT | {"model_type": "llama", "head_dim": 8}, "audio_config": {"model_type": "voxtral_encoder",
         "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_mel_bins": 16, "vocab_size": 97}, "audio_token_id": 5},
        before_language_model,
    ),
}  # fmt: skip


# The class ties heads unless its configuration says otherwise, and the repository has one nevertheless.
WITH_A_HEAD = ("mistral 3", "internvl")


def write_repository(folder: Path, case: str) -> Any:
    """A folder as the hub has it; returns the model that transformers makes of it."""
    family, fields, rename = CASES[case]
    name = f"{family}ForConditionalGeneration"
    model_class = getattr(transformers, name)
    config = {"architectures": [name], "model_type": model_class.config_class.model_type, "dtype": "float32", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = model_class(transformers.AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {rename(key): value.contiguous().clone() for key, value in made.state_dict().items()}
    head = next(key for key in state if key.endswith("lm_head.weight"))
    if case in WITH_A_HEAD:
        state[head] = torch.randn_like(state[head])
    elif getattr(made.config, "tie_word_embeddings", False):
        del state[head]
    if family in ("Qwen3_5", "Qwen3_5Moe"):  # layers of multi-token prediction, which nothing reads
        state["mtp.layers.0.input_layernorm.weight"] = torch.ones(32)
    if family == "Qwen3VLMoe":  # published [experts, inputs, outputs]
        state = {
            key: value.transpose(1, 2).contiguous() if ".experts." in key else value for key, value in state.items()
        }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder: Path) -> CausalLM:
    config, _, _ = read_served_config(ModelRunnerConfig(str(folder), max_model_len=64))
    arguments = (config, torch.float32, torch.device("cpu"))
    model = make_model(config["architectures"][0], "auto", arguments, Sharding())
    load_weights(model, folder)
    assert isinstance(model, CausalLM)
    return model


def greedy(reference: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW_TOKENS):
            logits = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_text_model_of_a_repository_equals_transformers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = write_repository(tmp_path, case)
    assert find_problems(ModelRunnerConfig(str(tmp_path), max_model_len=64)) == []
    model = load(tmp_path)
    assert "unexpected" not in caplog.text
    for prompt in PROMPTS:
        expected, logits = greedy(reference, prompt)
        assert PagedHarness(model, torch.float32).greedy(prompt, NUM_NEW_TOKENS) == expected
        tokens = prompt + expected[:-1]
        for size in (7, 23):
            harness = PagedHarness(model, torch.float32)
            starts = range(0, len(tokens), size)
            found = torch.cat([harness.step([("a", tokens[start : start + size])]) for start in starts])
            assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))


def test_a_repository_with_code_of_its_own_names_its_text_model_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT)).eval()
    llm_config = {**TEXT, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
    config = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": llm_config,
              "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}, "vision_config": {}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {f"language_model.{name}": tensor.clone() for name, tensor in made.state_dict().items()}
    state |= {"vision_model.embeddings.class_embedding": torch.zeros(1, 1, 8), "mlp1.0.weight": torch.ones(8)}
    save_file(state, tmp_path / "model.safetensors")
    assert PagedHarness(load(tmp_path), torch.float32).greedy(PROMPTS[0], 8) == greedy(made, PROMPTS[0])[0][:8]


def test_a_text_model_that_does_not_run_is_refused_as_before(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": CLIP,
              "text_config": {"model_type": "mamba"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path, {})["architectures"] == ["LlavaForConditionalGeneration"]
    problems = find_problems(ModelRunnerConfig(str(tmp_path), max_model_len=64, load_format="dummy"))
    assert "is a vision model, for images beside text, which is not supported" in problems[0]
