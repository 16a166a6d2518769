"""Engine cores of small models, and requests of every kind of sampling: for tests that no text depends on drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 64}
# Arguments of `build` for all that a scheduler may do.
VARIANTS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemption": {"num_blocks": 26},
    "swap": {"num_blocks": 26, "num_host_blocks": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"limits": {"max_num_batched_tokens": 9}},
}
LLAMA = {
    "vocab_size": 97, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.7, seed=1),
    "nucleus": SamplingParams(temperature=1.0, seed=2, top_p=0.7, logprobs=2),
    "penalised": SamplingParams(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1),
    "stopped": SamplingParams(temperature=0.0, min_tokens=20, stop_token_ids=tuple(range(0, 97, 3))),
}
# What repeats itself is found.
PROMPTS = [[11, 22, 33, 44 + number, 55] * 3 + [11, 22] for number in range(2)]


def build(
    model_path: str,
    speculative: SpeculativeConfig | None = None,
    limits: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **changes: Any,
) -> EngineCore:
    """An engine core. `limits` and `model` are changes of those settings, and `changes` of the other ones."""
    values = LIMITS | (limits or {})
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    runner = ModelRunnerConfig(
        model_path, block_size=4, device="cpu", max_num_drafts=num_drafts, **(model or {}), **values
    )
    scheduler = SchedulerConfig(speculative=speculative, **values)
    return build_engine_core(EngineConfig(runner, scheduler=scheduler, **({"num_blocks": 144} | changes)))


def requests(max_tokens: int) -> list[EngineCoreRequest]:
    """A request per prompt and kind of sampling."""
    return [
        EngineCoreRequest(f"{kind} {number}", prompt, replace(params, max_tokens=max_tokens))
        for number, prompt in enumerate(PROMPTS)
        for kind, params in PARAMS.items()
    ]
