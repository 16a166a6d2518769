"""Captured steps over Triton's kernels: no wait, no changing argument, and the same tokens.

Native code that replaces kernels on a CPU proves nothing about graph capture. Here the kernels run in the interpreter,
and the CPU stand-in notes the arguments of each launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_runner_helpers.cpu_stand_in import CpuStandIn

from llmstack_kernels.dispatch import TRITON
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_random_adapter, write_random_weights
from llmstack_types import ModelRunnerConfig, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed (extra `triton` of llmstack-kernels)")

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"architectures": ["LlamaForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 61},
    "gemma2": SHAPE
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
    "lfm2": SHAPE
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5": SHAPE
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "mixtral": SHAPE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(temperature=1.0, seed=4, presence_penalty=0.5),
)


def generate(place: str, folder: str, num_requests: int, num_drafts: int = 0) -> dict[str, Any]:
    """On the CPU stand-in, or on the host: a step of prompts, then decodes, at the end of one row less.

    With `num_drafts` the same again, with drafts of which the last one is wrong.
    """
    config = ModelRunnerConfig(
        folder,
        device="cpu",
        max_model_len=40,
        max_num_seqs=num_requests,
        block_size=16,
        dtype="float32",
        cuda_graph_sizes=(num_requests * (1 + num_drafts),),
        max_num_drafts=num_drafts,
        enable_lora=(adapter := Path(folder) / "adapter").is_dir(),
        max_lora_rank=8,
    )
    runner = ModelRunner(config, CpuStandIn() if place == "stand-in" else None)
    runner.load_model()
    has_states = runner.kv_cache_spec().state_group is not None
    runner.initialize_kv_cache(12, 0, 1 + 2 * num_requests if has_states else 0)
    driver, identity = StepDriver(runner, 12), None
    if adapter.is_dir():
        identity = identity_of(adapter)
        runner.add_adapter(identity, runner.read_adapter(identity, str(adapter)))
    for index, params in enumerate(PARAMS[:num_requests]):
        driver.add(f"{index}", [index + 1] * 14, params, lora_name=identity if index else None)
    driver.run(4)  # the third decode begins a block
    driver.remove(f"{num_requests - 1}")
    driver.run(1)
    if num_drafts:
        draft(driver, num_requests, num_drafts)
    return {"outputs": driver.outputs, "errors": driver.errors, "backends": dict(runner.backends())}


def draft(driver: StepDriver, num_requests: int, num_drafts: int) -> None:
    """Computes each request again, under another name: the prompt, and a step with drafts over the end of a block."""
    known = dict(driver.outputs)
    names = {f"{index}": f"{index} again" for index in range(num_requests)}
    for index, (name, again) in enumerate(names.items()):
        if index < num_requests - 1:
            driver.remove(name)
        driver.add(again, [index + 1] * 14, PARAMS[index])
    driver.step(dict.fromkeys(names.values(), 14))
    guesses = {again: [*known[name][1:num_drafts], 60 - known[name][num_drafts]] for name, again in names.items()}
    driver.step(dict.fromkeys(names.values(), 1), guesses)
    for name, again in names.items():
        assert driver.outputs[again] == known[name][: num_drafts + 1]
    driver.step(dict.fromkeys(names.values(), 1))


def run(place: str, folder: Path, num_requests: int, num_drafts: int = 0, **environment: str) -> dict[str, Any]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("LLMSTACK_KERNELS", "TRITON_INTERPRET")
    }
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the helpers of the tests too
    command = [sys.executable, __file__, place, str(folder), str(num_requests), str(num_drafts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited | environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(folder: Path, num_requests: int, num_drafts: int = 0) -> None:
    found = run("stand-in", folder, num_requests, num_drafts, LLMSTACK_KERNELS=TRITON, TRITON_INTERPRET="1")
    expected = run("host", folder, num_requests, num_drafts)
    assert found["errors"] == {}
    assert found["outputs"] == expected["outputs"]
    of_states = [op for op in ("causal_convolution", "gated_delta_rule") if op in found["backends"]]
    for op in ("decode_inputs", "sample_tokens", "paged_attention", "linear", *of_states):
        assert found["backends"][op].startswith(TRITON)
    assert f"captured graphs of up to {num_requests * (1 + num_drafts)} rows" in found["backends"]["decode"]


def write(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return write_random_weights(folder)


@pytest.mark.full
def test_a_captured_step_contains_nothing_that_changes(tmp_path: Path) -> None:
    check(write(tmp_path, "llama"), num_requests=1)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_of_all_kinds_contain_nothing_that_changes(tmp_path: Path, name: str) -> None:
    check(write(tmp_path, name), num_requests=3)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_captured_steps_of_adapters_contain_nothing_that_changes(tmp_path: Path) -> None:
    folder = write(tmp_path, "gpt2")
    write_random_adapter(folder / "adapter", folder, ["wte", "c_attn", "c_proj"], seed=1)
    check(folder, num_requests=3)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_captured_steps_of_drafts_contain_nothing_that_changes(tmp_path: Path, name: str) -> None:
    check(write(tmp_path, name), num_requests=2, num_drafts=3)


if __name__ == "__main__":
    _, place, folder, num_requests, num_drafts = sys.argv
    print(json.dumps(generate(place, folder, int(num_requests), int(num_drafts))))
