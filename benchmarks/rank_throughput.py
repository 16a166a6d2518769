"""The throughput of two ranks beside one process.

python benchmarks/rank_throughput.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llmstack_llm import LLM, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 8, "vocab_size": 8192,
    "max_position_embeddings": 512, "eos_token_id": 0,
}  # fmt: skip


def measure_throughput(**sizes: int) -> tuple[float, float]:
    """Tokens per second of 64 requests: of their prompts, and of their decodes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "enable_prefix_caching": False}
        with LLM(folder, skip_tokenizer_init=True, max_num_batched_tokens=512, **options, **sizes) as llm:

            def run(num_prompt_tokens: int, num_tokens: int) -> float:
                prompts = [{"prompt_token_ids": [1 + index] * num_prompt_tokens} for index in range(64)]
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - start

            run(4, 4)
            return 64 * 64 / run(64, 1), 64 * 24 / run(2, 24)


def main() -> None:
    torch.set_num_threads(2)
    for name, sizes in {
        "one process": {},
        "TP 2": {"tensor_parallel_size": 2},
        "PP 2": {"pipeline_parallel_size": 2},
    }.items():
        prefill, decode_rate = measure_throughput(**sizes)
        print(f"{name}: {prefill:.0f} prompt tokens/s, {decode_rate:.0f} decoded tokens/s")


if __name__ == "__main__":
    main()
