"""Small models with states, engine cores that run them, and requests to these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, EngineCore, build_engine_core
from llmstack_model_runner.models.lfm2 import Lfm2
from llmstack_model_runner.models.llama import Settings
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

VOCAB_SIZE = 97
KINDS = ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]  # a whole period, and half of another
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "block_multiple_of": 8,
    "num_hidden_layers": len(KINDS), "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": KINDS,
    "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
QWEN3_5 = {name: value for name, value in CONFIG.items() if name != "block_multiple_of"} | {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "initializer_range": 0.1,
    "layer_types": ["full_attention" if kind == "full_attention" else "linear_attention" for kind in KINDS],
}  # fmt: skip
_OF_LLAMA = {name: value for name, value in CONFIG.items() if name not in ("block_multiple_of", "layer_types")}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32,
         "initializer_range": 0.1}  # fmt: skip
BAMBA = _OF_LLAMA | MAMBA | {"attn_layer_indices": [2, 4]}
GRANITE = _OF_LLAMA | MAMBA | {
    "layer_types": ["attention" if kind == "full_attention" else "mamba" for kind in KINDS], "num_local_experts": 6,
    "num_experts_per_tok": 2, "shared_intermediate_size": 40, "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.5, "logits_scaling": 2.0, "mamba_n_groups": 1,
}  # fmt: skip
FALCON = _OF_LLAMA | MAMBA | {
    "num_hidden_layers": 3, "mamba_d_ssm": None, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8], "key_multiplier": 0.6,
    "mlp_multipliers": [0.8, 0.4], "attention_out_multiplier": 0.7, "lm_head_multiplier": 0.5,
}  # fmt: skip
NEMOTRON = _OF_LLAMA | {
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp", "mamba", "attention", "moe", "mamba"],
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32, "head_dim": 16,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "initializer_range": 0.1,
    "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 32, "time_step_min": 1e-9, "time_step_floor": 0.1,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2,
    "state_size": 16, "chunk_size": 32, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
OLMO_HYBRID = _OF_LLAMA | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "initializer_range": 0.1,
    "layer_types": QWEN3_5["layer_types"],
}  # fmt: skip
JAMBA = _OF_LLAMA | {
    "attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 6, "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}  # fmt: skip
KIMI = _OF_LLAMA | {
    "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.1, "layer_types": QWEN3_5["layer_types"],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", CONFIG),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN3_5),
    "jamba": ("JambaConfig", "JambaForCausalLM", JAMBA),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO_HYBRID),
    "bamba": ("BambaConfig", "BambaForCausalLM", BAMBA),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", FALCON),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
    "granite": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE),
}
OTHER_FAMILIES = [name for name in FAMILIES if name != "lfm2"]
STATE_DTYPES = {name: ["bfloat16"] if name == "lfm2" else ["bfloat16", "float32"] for name in FAMILIES}
STATE_DTYPES["windowed"] = STATE_DTYPES["lfm2"]
WINDOWED = "WindowedLfm2ForCausalLM"
WINDOWED_CLASS = "state_engine:WindowedLfm2"
"""To be added to the table of architectures: no family of the hub has states beside windows."""
_WINDOW = 20
_WINDOWED_LAYER = KINDS.index("full_attention")
SHARED = [(7 * i + 3) % VOCAB_SIZE for i in range(150)]
PROMPTS = [SHARED[: 27 * i] + [(11 * i + j) % VOCAB_SIZE for j in range(2 + 9 * i)] for i in range(6)]
NUM_OUTPUT_TOKENS = 16


def write_checkpoint(folder: Path, family: str = "lfm2") -> Any:
    """Writes the weights; the model of transformers."""
    torch.manual_seed(1)
    config, model_class, values = FAMILIES[family]
    model = getattr(transformers, model_class)(getattr(transformers, config)(**values)).eval()
    model.save_pretrained(folder)
    return model


class WindowedLfm2(Lfm2):
    """LFM2 whose first layer with attention has a sliding window."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = super().read_settings(config)
        layers = list(settings.layers)
        layers[_WINDOWED_LAYER] = replace(layers[_WINDOWED_LAYER], sliding_window=_WINDOW)
        return replace(settings, layers=layers)


def write_windowed_checkpoint(folder: Path) -> Any:
    """As `write_checkpoint`, of LFM2 with a window in one of its layers."""
    values = CONFIG | {"attn_implementation": "eager"}
    torch.manual_seed(1)
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**values)).eval()
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [WINDOWED]}))
    attention: Any = model.model.layers[_WINDOWED_LAYER].self_attn
    attention.forward = _within_window(attention.forward)
    return model


def _within_window(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The attention of transformers, each of whose tokens sees no further back than the window."""

    def call(*arguments: Any, attention_mask: torch.Tensor, **options: Any) -> Any:
        num_queries, num_keys = attention_mask.shape[-2:]  # [1, 1, queries, keys]: what is added to the scores
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        masked = attention_mask.masked_fill(distance >= _WINDOW, torch.finfo(attention_mask.dtype).min)
        return forward(*arguments, attention_mask=masked, **options)

    return call


def build(folder: Path, num_blocks: int | None = 600, **changes: Any) -> EngineCore:
    tokens = changes.pop("max_num_batched_tokens", 64)
    limits = {"max_model_len": 256, "max_num_seqs": min(6, tokens), "max_num_batched_tokens": tokens}
    ranks = {name: changes.pop(name) for name in ("tensor_parallel_size", "pipeline_parallel_size") if name in changes}
    scheduler = SchedulerConfig(
        **limits,
        speculative=changes.pop("speculative", None),
        state_snapshot_interval=changes.pop("state_snapshot_interval", 0),
        pipeline_parallel_size=ranks.get("pipeline_parallel_size", 1),
    )
    model = ModelRunnerConfig(
        str(folder), dtype=changes.pop("dtype", "float32"), device="cpu", block_size=changes.pop("block_size", 16),
        max_num_drafts=scheduler.max_num_drafts,
        draft_model_path="" if scheduler.speculative is None else scheduler.speculative.model,
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),
        **limits, **ranks,
    )  # fmt: skip
    return build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=num_blocks, **changes))


def requests(
    prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = NUM_OUTPUT_TOKENS
) -> Iterator[EngineCoreRequest]:
    """Two requests per prompt, greedy and sampled."""
    for number, prompt in enumerate(prompts):
        for index in range(2):  # the second one is a fork of the first
            params = SamplingParams(
                temperature=0.8 * index, seed=number, max_tokens=max_tokens, ignore_eos=True, logprobs=1
            )
            yield EngineCoreRequest(f"{index}_{number}", prompt, params, fork_of=f"0_{number}" if index else "")


def run(core: EngineCore, *arrivals: EngineCoreRequest) -> dict[str, list[Any]]:
    """Each request's tokens and their log-probabilities."""
    answers: dict[str, list[Any]] = {}
    for request in arrivals or requests():
        core.add_request(request)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            sampled = zip(output.new_token_ids, output.logprobs or [], strict=True)
            answers.setdefault(output.request_id, []).extend(sampled)
    return answers


def run_twice(core: EngineCore) -> list[dict[str, list[Any]]]:
    """The answers of the requests, and those of the same requests that find what the first have left."""
    again = [replace(one, request_id=f"again_{one.request_id}", fork_of="") for one in requests()]
    first, second = run(core), run(core, *again)
    return [first, {name.removeprefix("again_"): sampled for name, sampled in second.items()}]


def uncut_answers(folder: Path) -> dict[str, list[Any]]:
    """Of an engine that finds no prefixes, and computes each prompt alone, without a cut but that before its end."""
    core = build(folder, max_num_batched_tokens=256, enable_prefix_caching=False)
    answers: dict[str, list[Any]] = {}
    for request in requests():
        answers |= run(core, replace(request, fork_of=""))
    core.shutdown()
    return answers
