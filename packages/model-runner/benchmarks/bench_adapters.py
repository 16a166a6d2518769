"""A decode step of 32 rows with 8 adapters of rank 16 against one without, as ratios of medians, in turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_gpt2_config, write_random_adapter
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_ROWS, NUM_ADAPTERS, RANK, NUM_TURNS, NUM_BLOCKS, CONTEXT = 32, 8, 16, 45, 512, 16
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50_257}
WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
}
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(folder: Path, shape: str) -> Sequence[str]:
    """Writes a configuration; the names of the layers that adapters change."""
    if shape == "gpt2":
        write_gpt2_config(folder, **GPT2)
        return ("attn.c_attn", "attn.c_proj")
    (folder / "config.json").write_text(json.dumps(WIDE), encoding="utf-8")
    return ALL_LINEARS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gpt2", "wide"])
def test_decode_step_with_adapters(benchmark: Any, tmp_path: Path, shape: str, dtype: str) -> None:
    """`ratio` is of wall time, `cpu_ratio` of the time of all threads; both are reported, and printed."""
    targets = make_model(tmp_path, shape)
    config = ModelRunnerConfig(
        str(tmp_path), dtype=dtype, load_format="dummy", max_model_len=128, max_num_seqs=2 * NUM_ROWS,
        enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=RANK,
    )  # fmt: skip
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    identities = []
    for number in range(NUM_ADAPTERS):
        folder = write_random_adapter(tmp_path / f"{number}", tmp_path, targets, number, RANK, spread=0.01)
        identities.append(identity_of(folder, f"{number}"))
        runner.add_adapter(identities[-1], runner.read_adapter(identities[-1], str(folder)))
    driver = StepDriver(runner, NUM_BLOCKS)
    kinds: dict[str, dict[str, int]] = {"base": {}, "adapted": {}}
    for row in range(NUM_ROWS):
        for kind, name in (("base", None), ("adapted", identities[row % NUM_ADAPTERS])):
            kinds[kind][f"{kind} {row}"] = 1
            driver.add(f"{kind} {row}", list(range(CONTEXT)), SamplingParams(temperature=0.0), lora_name=name)
            driver.step({f"{kind} {row}": CONTEXT})
    times: dict[str, list[tuple[float, float]]] = {"base": [], "adapted": []}

    def turn() -> None:
        for kind, rows in kinds.items():
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            driver.step(rows)
            times[kind].append((time.perf_counter() - start_s, time.process_time() - cpu_start_s))

    benchmark.pedantic(turn, rounds=NUM_TURNS, warmup_rounds=2)
    for place, name in enumerate(("ratio", "cpu_ratio")):
        base, adapted = (statistics.median(pair[place] for pair in times[kind]) for kind in ("base", "adapted"))
        benchmark.extra_info[name] = adapted / base
        print(f"{shape} {dtype} {name}: {adapted / base:.3f} ({adapted * 1e3:.2f} ms against {base * 1e3:.2f} ms)")
