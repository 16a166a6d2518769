"""Audits of prefix hits over real models: keys and values, those of windows, and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

VOCAB_SIZE = 97
BASE: dict[str, Any] = (
    {name: value for name, value in tiny.LLAMA.items() if name not in ("num_hidden_layers", "intermediate_size")}
    | tiny.NO_ENDS
    | {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None}
)
LLAMA = BASE | {"num_hidden_layers": 2, "intermediate_size": 96}
GEMMA3 = LLAMA | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": 32}
LFM2 = {name: value for name, value in BASE.items() if name != "head_dim"} | {
    "intermediate_size": 96, "block_multiple_of": 8, "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
MODELS = {"LlamaForCausalLM": LLAMA, "Gemma3ForCausalLM": GEMMA3, "Lfm2ForCausalLM": LFM2}
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(61)]
NUM_HIT_TOKENS = 48


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp(request.param)
    model_class = getattr(transformers, request.param)
    model_class(model_class.config_class(**MODELS[request.param])).eval().save_pretrained(folder)
    return folder


def build(folder: Path, log_path: Path, **changes: Any) -> EngineCore:
    model = ModelRunnerConfig(
        str(folder), dtype="float32", device="cpu", block_size=16,
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"), **LIMITS,
    )  # fmt: skip
    scheduler = SchedulerConfig(**LIMITS)
    return build_engine_core(
        EngineConfig(model, scheduler=scheduler, num_blocks=300, audit_hits=1.0, record_steps=str(log_path), **changes)
    )


def ask(core: EngineCore, name: str) -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt's were found."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
    core.add_request(EngineCoreRequest(name, PROMPT, params))
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step().outputs
    return [token_id for output in outputs for token_id in output.new_token_ids], outputs[0].num_cached_tokens


def audit(core: EngineCore) -> tuple[int, int]:
    core.stages.audits._next_s = 0.0  # type: ignore[attr-defined]  # whatever the last audit has cost
    core.work_when_idle()
    while core.has_unfinished_requests():
        assert not core.step().outputs
    stats = core.stats()
    return stats.num_agreeing_audits, stats.num_differing_audits


@pytest.mark.parametrize(
    "changes", [{}, {"async_scheduling": True}, {"kv_cache_dtype": "fp8"}], ids=["plain", "async", "fp8"]
)
def test_a_planted_error_is_found_and_the_next_text_is_right(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    log_path = tmp_path / "run.steps"
    core = build(checkpoint, log_path, **changes)
    right, _ = ask(core, "first")
    assert ask(core, "second") == (right, NUM_HIT_TOKENS)
    assert audit(core) == (1, 0)
    assert ask(core, "third") == (right, NUM_HIT_TOKENS)
    layers: Any = core.runner._kv_caches  # type: ignore[attr-defined]
    # A bit of the first layer, which is a state in LFM2; the signs of all where equal bits are not promised.
    has_equal_bits = core.ready.backends["numeric_contract"].startswith("holds")
    assert has_equal_bits == ("kv_cache_dtype" not in changes)
    for layer in layers[:1] if has_equal_bits else layers:
        for tensor in layer:
            tensor.view(torch.uint8).bitwise_xor_(1 if has_equal_bits else 128)
    assert audit(core) == (1, 1)
    assert ask(core, "fourth") == (right, 0)
    assert ask(core, "fifth") == (right, NUM_HIT_TOKENS)
    assert audit(core) == (2, 1)
    core.shutdown()
    assert verify(read_step_log(log_path)).num_steps > 20
