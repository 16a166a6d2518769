"""Time of a decode step of one row beside the time that its bytes take, for each kind of memory that a layer has.

    python packages/model-runner/benchmarks/decode_kinds.py [KIND ...]

Weights are random, in bfloat16, with one period of layers and sizes of published models of some thousand million
weights. Bytes are those of the weights that a token uses, without the table of embeddings. The rate at which one
thread reads memory is measured in turns with the steps. One thread, processor time, medians. The last column is the
step's time over that of its bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_kernels.native import require_library
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "benchmarks"))
from roofline import Roofs

LIMITS = {"max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": 512}
PROMPT, NUM_TOKENS, NUM_TURNS = 64, 24, 5
SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention (Llama)": ("llama", {**SIZES, "num_hidden_layers": 8}),
    "delta rule (Qwen 3.5)": (
        "qwen3_5_text",
        {
            **SIZES, "num_hidden_layers": 4, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
            "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        },
    ),
    "Mamba-2": (
        "mamba2",
        {
            "vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 12, "num_heads": 64, "head_dim": 64,
            "state_size": 128, "n_groups": 1, "tie_word_embeddings": False,
        },
    ),
    "short convolution (LFM2)": (
        "lfm2",
        {
            **SIZES, "num_hidden_layers": 6, "block_auto_adjust_ff_dim": False, "block_ff_dim": 6144,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
        },
    ),
    "latent attention (DeepSeek V3)": (
        "deepseek_v3",
        {
            **SIZES, "num_hidden_layers": 6, "first_k_dense_replace": 6, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 16,
        },
    ),
    "two head sizes (Gemma 4)": (
        "gemma4_text",
        {
            **SIZES, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"], "sliding_window": 512,
        },
    ),
}  # fmt: skip


def write_model(folder: Path, model_type: str, sizes: dict[str, Any]) -> int:
    """Writes the configuration; returns the bytes of the weights that a token reads."""
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    described = config.to_dict() | {"architectures": [type(model).__name__], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    table = model.get_input_embeddings()
    num_unread = 0 if table.weight is model.get_output_embeddings().weight else table.weight.numel()
    return 2 * (sum(weight.numel() for weight in model.parameters()) - num_unread)


def open_core(folder: Path) -> EngineCore:
    """An engine core with random weights in this process."""
    config = ModelRunnerConfig(str(folder), device="cpu", load_format="dummy", pack_cache=False, **LIMITS)
    return build_engine_core(
        EngineConfig(config, scheduler=SchedulerConfig(**LIMITS), kv_cache_bytes=1 << 28, snapshot_steps=0)
    )


def decode(core: EngineCore, number: int) -> float:
    """Processor seconds of a decode step, the median of one answer."""
    prompt = [(7919 * number + 31 * place) % 30_000 for place in range(PROMPT)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    core.add_request(EngineCoreRequest(str(number), prompt, params))
    seconds: list[float] = []
    while core.has_unfinished_requests():
        start = time.thread_time()
        core.step()
        seconds.append(time.thread_time() - start)
    return median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=[])
    chosen = parser.parse_args().kinds or list(KINDS)
    torch.set_num_threads(1)
    roofs = Roofs(require_library().variant, 1, "bfloat16")
    print("| kind | MB of a token | ms of a step | GB/s | memory's GB/s | ratio |\n|---|---|---|---|---|---|")
    for kind in chosen:
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = write_model(Path(folder), *KINDS[kind])
            core = open_core(Path(folder))
            seconds = []
            for turn in range(NUM_TURNS):
                roofs.measure()
                seconds.append(decode(core, turn))
            core.shutdown()
        step_s, rate = median(seconds), roofs.bytes_per_s
        figures = num_bytes / 1e6, 1e3 * step_s, num_bytes / step_s / 1e9, rate / 1e9
        shown = " | ".join(f"{figure:.1f}" for figure in figures)
        print(f"| {kind} | {shown} | {step_s * rate / num_bytes:.2f} |", flush=True)


if __name__ == "__main__":
    main()
