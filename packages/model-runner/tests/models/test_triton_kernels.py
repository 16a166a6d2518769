"""Whole models over Triton's kernels, in its interpreter, choose the tokens that they choose over native code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_kernels.dispatch import TRITON
from llmstack_model_runner.testing import write_random_weights

pytest.importorskip("triton", reason="Triton is not installed (extra `triton` of llmstack-kernels)")

SCRIPT = Path(__file__).with_name("greedy_outputs.py")
STORIES = Path(__file__).resolve().parents[4].parent / "shared" / "models" / "stories260k"
OPS = (
    "activation",
    "embedding",
    "argmax",
    "layer_norm",
    "linear",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_and_cache",
)

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 61},
    "llama": LLAMA | {"architectures": ["LlamaForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma2": LLAMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
    "neox": LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
}


def write_model(parent: Path, name: str) -> Path:
    """A tiny model with random weights; returns its folder."""
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return write_random_weights(folder)


def run(num_tokens: int, folders: list[Path], device: str = "cpu", **environment: str) -> dict[str, dict[str, Any]]:
    """What `greedy_outputs.py` prints in a process with these variables."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("LLMSTACK_KERNELS", "TRITON_INTERPRET")
    }
    command = [sys.executable, str(SCRIPT), device, str(num_tokens), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited | environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def run_triton(num_tokens: int, folders: list[Path]) -> dict[str, dict[str, Any]]:
    """With Triton's kernels for all operations that have one, on a CPU."""
    return run(num_tokens, folders, LLMSTACK_KERNELS=TRITON, TRITON_INTERPRET="1")


def check_tokens(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    """Equal for each model, and such that they show what came before them."""
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        check_backends(found[name]["backends"])
        for request_id in ("first", "second"):
            assert (name, found[name][request_id]) == (name, outputs[request_id])
        assert len(set(outputs["first"])) > 1


def check_backends(backends: dict[str, str]) -> None:
    assert {op for op in OPS if not backends[op].startswith(f"{TRITON} (")} == set()


@pytest.mark.slow
def test_a_tiny_model_chooses_the_tokens_that_it_chooses_over_native_code(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    found = run_triton(4, [folder])
    check_tokens(found, run(4, [folder]))
    assert found["llama"]["backends"]["decode"].startswith("not captured: ")  # native calls are, and there are none


@pytest.mark.full
def test_tiny_models_of_all_kinds_choose_the_same_tokens(tmp_path: Path) -> None:
    folders = [write_model(tmp_path, name) for name in CONFIGS]
    check_tokens(run_triton(6, folders), run(6, folders))


@pytest.mark.gpu
def test_tiny_models_choose_the_same_tokens_on_a_gpu(tmp_path: Path) -> None:
    folders = [write_model(tmp_path, name) for name in CONFIGS]
    check_tokens(run(6, folders, "cuda"), run(6, folders))


@pytest.mark.full
@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared model stories260k is not there")
def test_stories260k_begins_its_published_story() -> None:
    published = json.loads((STORIES / "golden.json").read_text())["published"]
    assert published["prompt_token_ids"] == [1]
    found = run_triton(16, [STORIES])[STORIES.name]
    assert found["first"] == published["output_token_ids"][:16]
    assert found["second"] == published["output_token_ids"][8:16]
    check_backends(found["backends"])
