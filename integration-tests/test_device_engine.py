"""An engine core that schedules ahead of a device says what one does that waits for the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_engine

from llmstack_engine_core import EngineCore, SpeculativeConfig
from llmstack_engine_core.testing import check_model_runner
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

testing = pytest.importorskip("llmstack_model_runner.testing")
native = pytest.importorskip("llmstack_kernels.native")
stand_ins = pytest.importorskip("model_runner_helpers.cpu_stand_in")

pytestmark = pytest.mark.skipif(native.library() is None, reason="equality to the bit needs the native kernels")

STAND_IN = "model_runner_helpers.cpu_stand_in:StandInModelRunner"
LIMITS = {"max_num_seqs": 5, "max_num_batched_tokens": 32}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LFM2 = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
}  # fmt: skip
PARAMS = small_engine.PARAMS | {
    "stopped": SamplingParams(temperature=0.0, min_tokens=7, stop_token_ids=tuple(range(0, 97, 3))),
    "biased": SamplingParams(temperature=1.0, seed=3, logit_bias={5: 2.0}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemption": {"num_blocks": 30},
    "swap": {"num_blocks": 30, "num_host_blocks": 64},
}


@pytest.fixture(scope="module", params=["gpt2", "llama", "lfm2"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        return str(testing.write_gpt2_checkpoint(folder, seed=5, n_embd=64))
    (folder / "config.json").write_text(json.dumps(LFM2 if request.param == "lfm2" else LLAMA), encoding="utf-8")
    return str(testing.write_random_weights(folder, seed=5))


def build(model_path: str, runner: str, speculative: SpeculativeConfig | None = None, **changes: Any) -> EngineCore:
    return small_engine.build(model_path, speculative, LIMITS, runner=runner, **changes)


def run(core: EngineCore) -> dict[str, list[object]]:
    """Tokens and log-probabilities of all requests; one of them is aborted in the midst of its decode."""
    generated: dict[str, list[object]] = {}
    for number, prompt in enumerate(small_engine.PROMPTS):
        for name, params in PARAMS.items():
            generated[f"{name}-{number}"] = []
            core.add_request(EngineCoreRequest(f"{name}-{number}", prompt[: 17 - 6 * number], params))
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None, output.error
            logprobs = output.logprobs or [None] * len(output.new_token_ids)
            generated[output.request_id] += zip(output.new_token_ids, logprobs, strict=True)
        if len(generated["greedy-1"]) == 5:
            core.abort_requests(["greedy-1"])
    core.shutdown()
    return {name: values[:5] if name == "greedy-1" else values for name, values in generated.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_scheduling_ahead_of_a_device_changes_no_output(model_path: str, variant: str) -> None:
    waiting = run(build(model_path, "default", **VARIANTS[variant]))
    ahead = run(build(model_path, STAND_IN, async_scheduling=True, **VARIANTS[variant]))
    assert ahead == waiting
    assert sum(map(len, ahead.values())) > 150


def test_drafts_on_a_device_change_no_output(model_path: str) -> None:
    lookup = SpeculativeConfig("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1)
    assert run(build(model_path, STAND_IN, lookup)) == run(build(model_path, "default"))


def test_a_runner_on_a_device_does_what_the_engine_core_asks_of_one(model_path: str) -> None:
    if "lfm2" in model_path:
        pytest.skip("the check of runners asks for no states")
    config = ModelRunnerConfig(model_path, max_model_len=64, max_num_seqs=4, block_size=4, device="cpu")
    check_model_runner(lambda: stand_ins.StandInModelRunner(config))
