"""Every architecture and variant computes what transformers computes, however the tokens are cut into steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers import tiny_configs as tiny
from model_runner_helpers.gemma_cases import GEMMA_CASES
from model_runner_helpers.glm_cases import GLM_CASES
from model_runner_helpers.mamba_cases import MAMBA_CASES
from model_runner_helpers.paged_harness import PagedHarness, check_neighbours
from model_runner_helpers.state_cases import STATE_CASES

from llmstack_model_files import parse_json_object
from llmstack_model_runner.models import CausalLM, load_model_class
from llmstack_model_runner.weights import load_weights, resolve_dtype

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 97
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
FLOAT32_TOLERANCE = 2e-5
BFLOAT16_TOLERANCE = 0.15  # logits of about 1 in size, through two layers rounded to 8 bits each time

LLAMA: dict[str, Any] = tiny.LLAMA | {"tie_word_embeddings": False}
GPT2: dict[str, Any] = tiny.GPT2
OPT: dict[str, Any] = tiny.OPT
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}
QWEN3_MOE = LLAMA | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS = LLAMA | {"head_dim": 16, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS |= {"rope_parameters": YARN_ROPE | {"beta_fast": 32.0, "truncate": False}}
PHI3 = LLAMA | {"hidden_size": 64, "pad_token_id": 0}
NEOX = LLAMA | {"hidden_size": 64}
FALCON = LLAMA | {"num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": True}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEEPSEEK = LLAMA | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
KIMI = {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "n_shared_experts": 2}
MISTRAL4: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.3}
MISTRAL4 |= {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2}}
DEEPSEEK_YARN = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8}
# For heads of 16 with RoPE over half of the dimensions.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
}

LFM2 = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 96, "block_multiple_of": 8, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
}  # fmt: skip
LFM2_MOE = {name: value for name, value in LFM2.items() if name != "block_multiple_of"} | {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_dense_layers": 2,
}  # fmt: skip
# Larger weights have differences of 1e-4 between transformers in float32 and in float64: norms of almost nothing.
QWEN3_5: dict[str, Any] = LLAMA | {
    "num_hidden_layers": 5, "initializer_range": 0.1, "head_dim": 16, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "bos_token_id": None, "eos_token_id": None,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
QWEN3_NEXT = QWEN3_5 | {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = (
    MAMBA_CASES
    | GEMMA_CASES
    | GLM_CASES
    | STATE_CASES
    | {
        "gpt2": ("GPT2", GPT2),
        "gpt2 with inner size and exact gelu": ("GPT2", GPT2 | {"n_inner": 40, "activation_function": "gelu"}),
        "gpt2 scaled by layer": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
        "gpt2 with its own head": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
        "opt": ("OPT", OPT),
        "opt with projections and norms after": (
            "OPT",
            OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        ),
        "opt without biases": ("OPT", OPT | {"enable_bias": False}),
        "lfm2": ("Lfm2", LFM2),
        "lfm2 with biases, longer convolutions and its own head": (
            "Lfm2",
            LFM2
            | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
        ),
        "lfm2 with experts": ("Lfm2Moe", LFM2_MOE),
        "lfm2 with experts that nothing corrects": (
            "Lfm2Moe",
            LFM2_MOE
            | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "routed_scaling_factor": 1.7},
        ),
        "llama 2": ("Llama", LLAMA | {"num_key_value_heads": 4}),
        "llama with shared kv heads": ("Llama", LLAMA),
        "llama tied with one kv head": ("Llama", LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        "llama with biases and head size": (
            "Llama",
            LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
        ),
        "llama with linear rope": ("Llama", LLAMA | {"rope_parameters": LINEAR_ROPE}),
        "llama with llama3 rope": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
        "llama with yarn rope": ("Llama", LLAMA | {"rope_parameters": YARN_ROPE}),
        "mistral": ("Mistral", LLAMA | {"sliding_window": None, "head_dim": 8}),
        "mistral with sliding window": ("Mistral", LLAMA | {"sliding_window": 7, "head_dim": 8}),
        "qwen2": ("Qwen2", LLAMA),
        "qwen2 with sliding window on the second layer": (
            "Qwen2",
            LLAMA | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        ),
        "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
        "qwen3 tied with biases": (
            "Qwen3",
            LLAMA | {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
        ),
        "qwen 3.5": ("Qwen3_5Text", QWEN3_5),
        "qwen 3.5 tied, with biases, as many key heads and longer convolutions": (
            "Qwen3_5Text",
            QWEN3_5
            | {
                "linear_num_key_heads": 6,
                "linear_conv_kernel_dim": 5,
                "attention_bias": True,
                "tie_word_embeddings": True,
            }
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        ),
        "qwen 3.5 with experts": (
            "Qwen3_5MoeText",
            {name: value for name, value in QWEN3_NEXT.items() if name not in ("mlp_only_layers", "intermediate_size")},
        ),
        "qwen3 next": ("Qwen3Next", QWEN3_NEXT),
        "qwen3 next whose shares do not sum to 1": (
            "Qwen3Next",
            QWEN3_NEXT
            | {"norm_topk_prob": False, "decoder_sparse_step": 2, "layer_types": None, "num_hidden_layers": 4},
        ),
        "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
        "mixtral with sliding window": ("Mixtral", LLAMA | {"num_local_experts": 3, "sliding_window": 7}),
        "qwen3 with experts": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
        "qwen3 with experts in some layers, whose shares do not sum to 1": (
            "Qwen3Moe",
            QWEN3_MOE
            | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
        ),
        "phi 3": ("Phi3", PHI3),
        "phi 3 with sliding window": ("Phi3", PHI3 | {"sliding_window": 7}),
        "phi 3 with rope on a part of each head": (
            "Phi3",
            PHI3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
        ),
        "phi 3 with long rope": ("Phi3", PHI3 | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
        "gpt neox": ("GPTNeoX", NEOX),
        "gpt neox with sequential blocks, without biases, with rope on whole heads": (
            "GPTNeoX",
            NEOX
            | {"use_parallel_residual": False, "attention_bias": False}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        ),
        "phi": ("Phi", NEOX | {"num_key_value_heads": 4}),
        "phi with shared kv heads and linear rope": ("Phi", NEOX | {"rope_parameters": LINEAR_ROPE}),
        "stablelm": ("StableLm", NEOX),
        "stablelm parallel with biases and linear rope": (
            "StableLm",
            NEOX | {"use_parallel_residual": True, "use_qkv_bias": True, "rope_parameters": LINEAR_ROPE},
        ),
        "falcon with one kv head": ("Falcon", FALCON),
        "falcon with groups and two norms": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
        "falcon with groups and one norm": (
            "Falcon",
            FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
        ),
        "falcon with alibi, biases and sequential blocks": (
            "Falcon",
            FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        ),
        "bloom": (
            "Bloom",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
        ),
        "bloom with six heads": (
            "Bloom",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 2, "n_head": 6, "initializer_range": 0.3},
        ),
        "deepseek v2": ("DeepseekV2", DEEPSEEK | {"attention_bias": True, "mlp_bias": True}),
        "deepseek v2 lite with yarn": (
            "DeepseekV2",
            DEEPSEEK | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN},
        ),
        "deepseek v2 with groups of experts": (
            "DeepseekV2",
            DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "n_shared_experts": 1},
        ),
        "deepseek v3 with yarn": (
            "DeepseekV3",
            DEEPSEEK | {"rope_parameters": DEEPSEEK_YARN, "routed_scaling_factor": 1.0},
        ),
        "deepseek v3 with one group, as kimi k2": ("DeepseekV3", DEEPSEEK | KIMI),
        "deepseek v3 without interleaved rope": (
            "DeepseekV3",
            DEEPSEEK
            | {"rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 32, "first_k_dense_replace": 0},
        ),
        "ernie 4.5": ("Ernie4_5", LLAMA | {"use_bias": True}),
        "ernie 4.5 with experts": ("Ernie4_5_Moe", LLAMA | {"moe_num_experts": 6, "moe_intermediate_size": 24}),
        "mistral 4": ("Mistral4", DEEPSEEK | MISTRAL4),
        "gpt oss": ("GptOss", GPT_OSS | {"num_hidden_layers": 3, "swiglu_limit": 0.5}),
        "gpt j": ("GPTJ", GPT2 | {"rotary_dim": 4}),
        "gpt j with rope on whole heads": ("GPTJ", GPT2 | {"rotary_dim": 8, "n_inner": 40}),
    }
)
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Gemma4UnifiedText": "Gemma4UnifiedForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}


PARAMETERS = [
    pytest.param(name, marks=pytest.mark.full if name in MAMBA_CASES and name != "bamba" else ()) for name in CASES
]


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda name: name.replace(" ", "-"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A random checkpoint, and transformers' logits at every position of the prompt and 8 greedy tokens after it."""
    family, values = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(
                (
                    "bias",
                    "norm.weight",
                    "sinks",
                    "ln_f.weight",
                    "_1.weight",
                    "_2.weight",
                    "scalar",
                    "r.scale",
                    "t_scale",
                )
            ):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # zeros and ones would hide a tensor that is not used
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    with torch.no_grad():
        tokens = list(PROMPT)
        for _ in range(8):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return folder, logits


def load(
    folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None, **changes: Any
) -> CausalLM:
    config = parse_json_object((folder / "config.json").read_bytes(), "config.json") | changes
    model = load_model_class(config["architectures"][0])(config, dtype, torch.device("cpu"))
    if max_model_len is not None:
        model.limit_context(max_model_len)
    load_weights(model, folder)
    return model


def expected_tokens(logits: torch.Tensor) -> list[int]:
    return logits[len(PROMPT) - 1 :].argmax(-1).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = FLOAT32_TOLERANCE) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1.0))


def test_long_rope_is_that_of_short_contexts_while_no_longer_ones_are_served(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = PHI3 | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**values)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    short = load(tmp_path, max_model_len=32)
    close(PagedHarness(short, torch.float32).step([("short", PROMPT)]), expected)
    long = PagedHarness(load(tmp_path, max_model_len=33), torch.float32).step([("long", PROMPT)])
    assert not torch.allclose(long, expected, atol=0.01)


def test_a_whole_prefill_and_greedy_decodes_equal_transformers(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    harness = PagedHarness(load(folder), torch.float32)
    close(harness.step([("whole", PROMPT)]), expected[: len(PROMPT)])
    assert harness.greedy(PROMPT, 8) == expected_tokens(expected)


def test_chunks_decodes_and_neighbours_in_one_batch_change_nothing(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    tokens = PROMPT + expected_tokens(expected)[:-1]
    harness = PagedHarness(load(folder), torch.float32)
    check_neighbours(harness, tokens, expected, close)


def test_bfloat16_stays_within_its_tolerance(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    harness = PagedHarness(load(folder, torch.bfloat16), torch.bfloat16)
    actual = harness.step([("whole", PROMPT)])
    config = json.loads((folder / "config.json").read_text())
    if {"n_group", "num_expert_group", "num_dense_layers", "linear_num_key_heads"} & config.keys() or config.get(
        "top_k_experts"
    ):
        # A token whose experts are others in bfloat16, or whose delta net answers almost nothing before it is normed,
        # is far away; transformers has as many of them, or twice as many.
        limit = BFLOAT16_TOLERANCE * float(expected.abs().max())
        is_close = (actual - expected[: len(PROMPT)]).abs().amax(-1) <= limit
        assert is_close.float().mean() >= 0.6
        return
    close(actual, expected[: len(PROMPT)], BFLOAT16_TOLERANCE)


def test_older_configurations_mean_the_same(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None)
    if rope is None:
        pytest.skip("no rotary embedding")
    if config["model_type"].startswith("gemma4"):
        pytest.skip("its first checkpoints have the newest form")
    older: dict[str, Any] = {"rope_parameters": None}
    if "full_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if config["model_type"] == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    older |= {own: rope.pop(name) for name, own in names.items() if name in rope}
    if "original_max_position_embeddings" in config:  # as Phi-3's do
        rope.pop("original_max_position_embeddings", None)
    if rope["rope_type"] != "default":
        older["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    close(PagedHarness(load(folder, **older), torch.float32).step([("a", PROMPT)]), expected[: len(PROMPT)])


def test_the_type_is_the_checkpoints_unless_named(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    assert resolve_dtype("auto", config, folder) is torch.float32
    assert resolve_dtype("auto", {"torch_dtype": "bfloat16"}, folder) is torch.bfloat16
    assert resolve_dtype("auto", {}, folder) is torch.float32
    assert resolve_dtype("float16", config, folder) is torch.float16
