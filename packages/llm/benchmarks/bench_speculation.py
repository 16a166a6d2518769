"""What drafts by prompt lookup are worth: output tokens per second with and without, as a ratio in one run.

GPT-2's shape with random weights, greedy, end of text ignored. Such a model soon repeats itself, so nearly every draft
is right: this is the gain where text repeats itself, as in edits, summaries and code. `no repetition` has penalties
that keep the text from it: the cost of looking up, and of verifying what is wrong.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

pytest.importorskip("llmstack_model_runner")

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50_257,
}  # fmt: skip
LIMITS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
LOOKUP = SpeculativeConfig("ngram", 5)
NUM_OUTPUT_TOKENS = 48
WORKLOADS = {
    "repetition": SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS),
    "no repetition": SamplingParams(temperature=1.0, seed=1, frequency_penalty=2.0, max_tokens=NUM_OUTPUT_TOKENS),
}


def make_core(folder: Path, speculative: SpeculativeConfig | None) -> EngineCore:
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    model = ModelRunnerConfig(
        str(folder), dtype="bfloat16", load_format="dummy", device="cpu", max_num_drafts=num_drafts, **LIMITS
    )
    scheduler = SchedulerConfig(speculative=speculative, **LIMITS)
    return build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=512, enable_prefix_caching=False))


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineCore]:
    """An engine core with drafts and one without."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps(GPT2))
    return {"with": make_core(folder, LOOKUP), "without": make_core(folder, None)}


def generate(core: EngineCore, num_requests: int, params: SamplingParams) -> float:
    """Output tokens per second."""
    for number in range(num_requests):
        prompt = [(31 * number + 7 * (position % 12)) % 50_000 for position in range(64)]
        core.add_request(EngineCoreRequest(str(number), prompt, params))
    start_s = time.perf_counter()
    while core.has_unfinished_requests():
        core.step()
    return num_requests * NUM_OUTPUT_TOKENS / (time.perf_counter() - start_s)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("num_requests", [1, 4])
def test_generation(benchmark: Any, cores: dict[str, EngineCore], num_requests: int, workload: str) -> None:
    """A batch of requests, with drafts and without them in turn."""
    params = WORKLOADS[workload]
    without = max(generate(cores["without"], num_requests, params) for _ in range(2))
    before = cores["with"].stats()
    rates: list[float] = []
    benchmark.pedantic(lambda: rates.append(generate(cores["with"], num_requests, params)), rounds=2)
    stats = cores["with"].stats()
    num_draft_tokens = stats.num_draft_tokens - before.num_draft_tokens
    num_accepted = stats.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    benchmark.extra_info["tokens_per_s"] = max(rates)
    benchmark.extra_info["tokens_per_s_without"] = without
    benchmark.extra_info["speedup"] = max(rates) / without
    benchmark.extra_info["num_draft_tokens"] = num_draft_tokens
    benchmark.extra_info["acceptance_rate"] = num_accepted / num_draft_tokens if num_draft_tokens else 0.0
