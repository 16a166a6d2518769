"""Models of known shapes with made-up weights, as the runner loads them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig
from report.bench import Bench
from report.floors import ModelShape

BLOCK_SIZE = 16
KV_SHARE = 0.85
"""Of the memory that is left: recorded steps and peers need some as well."""


def config(shape: ModelShape) -> dict[str, Any]:
    """Its config.json."""
    if not shape.is_gated:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": shape.hidden_size,
            "n_head": shape.num_heads,
            "n_layer": shape.num_layers,
            "n_positions": shape.max_model_len,
            "vocab_size": shape.vocab_size,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "num_hidden_layers": shape.num_layers,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
        "vocab_size": shape.vocab_size,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.is_tied,
    }


def fitting(bench: Bench, shape: ModelShape) -> ModelShape:
    """The shape itself; in a smoke run a tiny one of the same kind."""
    heads = {"num_heads": 4, "num_kv_heads": 2 if shape.is_gated else 4, "head_dim": 16, "hidden_size": 64}
    tiny = replace(shape, num_layers=2, intermediate_size=96, vocab_size=320, max_model_len=256, **heads)
    return bench.pick(shape, tiny)


@dataclass(frozen=True, slots=True)
class Started:
    """A runner with its KV storage.

    Attributes:
        phases_s: Seconds of each part of its start.
    """

    runner: ModelRunner
    num_blocks: int
    phases_s: dict[str, float]


@contextmanager
def model_folder(shape: ModelShape) -> Iterator[Path]:
    """A folder with its config.json and nothing else."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config(shape)), encoding="utf-8")
        yield Path(name)


@contextmanager
def started(bench: Bench, shape: ModelShape, num_tokens: int, **options: Any) -> Iterator[Started]:
    """A runner of made-up weights with room for `num_tokens` tokens, or for as many as fit; shut down afterwards.

    `options` are fields of `ModelRunnerConfig`.
    """
    with model_folder(shape) as folder, start_model(bench, folder, num_tokens, **options) as runner:
        yield runner


@contextmanager
def start_model(bench: Bench, folder: Path, num_tokens: int, **options: Any) -> Iterator[Started]:
    """The same for the model in a folder."""
    fields = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "device": bench.device.type,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": bench.pick(8192, 64),
        **options,
    }
    runtime = None
    if bench.is_smoke:  # a GPU's steps on a CPU, which raises where a GPU would go wrong
        from model_runner_helpers.cpu_stand_in import CpuStandIn  # a test helper, on the path in smoke runs only

        runtime = CpuStandIn()
    runner = ModelRunner(ModelRunnerConfig(str(folder), **fields), runtime)
    try:
        yield _start(bench, runner, num_tokens)
    finally:
        runner.shutdown()


def _start(bench: Bench, runner: ModelRunner, num_tokens: int) -> Started:
    times = [time.perf_counter()]
    runner.load_model()
    bench.synchronize()
    times.append(time.perf_counter())
    available = int(KV_SHARE * runner.available_kv_bytes(is_size_given=True))
    num_blocks = min(available // runner.kv_cache_spec().bytes_per_block, -(-num_tokens // BLOCK_SIZE))
    runner.initialize_kv_cache(num_blocks)
    bench.synchronize()
    times.append(time.perf_counter())
    return Started(runner, num_blocks, {"weights": times[1] - times[0], "KV storage and graphs": times[2] - times[1]})
