"""What drafts by prompt lookup are worth: output tokens per second with and without, as a ratio in one run.

Two models. GPT-2's shape has random weights. Such a model soon repeats itself, so nearly every draft is right: this is
the gain where text repeats itself, as in edits, summaries and code. `no repetition` has penalties that keep the text
from it: the cost of looking up, and of verifying what is wrong. The demo model, which is trained, continues stories and
text like code. `fixed` has five drafts wherever an n-gram is found, `adaptive` as many as are expected to repay
their cost, as is the default on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
SETTINGS = {
    "without": None,
    "fixed": SpeculativeConfig("ngram", 5),
    "adaptive": SpeculativeConfig("ngram", 6, is_adaptive=True),
}
NUM_ROUNDS = 3
NUM_OUTPUT_TOKENS = 48
WORKLOADS = {
    "repetition": SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS),
    "no repetition": SamplingParams(temperature=1.0, seed=1, frequency_penalty=2.0, max_tokens=NUM_OUTPUT_TOKENS),
}


STORY = "Once upon a time there was a little girl who lived with her grandmother in a house at the edge of the wood. "
CODE = """def add(left, right):
    return left + right

def subtract(left, right):
    return left - right

def multiply(left, right):
    return left * right

"""


def make_cores(folder: Path, load_format: str) -> dict[str, EngineCore]:
    """An engine core for each setting."""
    return {name: make_core(folder, load_format, setting) for name, setting in SETTINGS.items()}


def make_core(folder: Path, load_format: str, speculative: SpeculativeConfig | None) -> EngineCore:
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    model = ModelRunnerConfig(
        str(folder), dtype="bfloat16", load_format=load_format, device="cpu", max_num_drafts=num_drafts, **LIMITS
    )
    scheduler = SchedulerConfig(speculative=speculative, **LIMITS)
    return build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=512, enable_prefix_caching=False))


@pytest.fixture(scope="module")
def random_cores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineCore]:
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps(GPT2))
    return make_cores(folder, "dummy")


@pytest.fixture(scope="module")
def demo_cores() -> dict[str, EngineCore]:
    return make_cores(pytest.importorskip("llmstack_demo_model").model_path(), "auto")


def generate(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Output tokens per second."""
    for number, prompt in enumerate(prompts):
        core.add_request(EngineCoreRequest(str(number), list(prompt), params))
    start_s = time.perf_counter()
    while core.has_unfinished_requests():
        core.step()
    return len(prompts) * (params.max_tokens or 0) / (time.perf_counter() - start_s)


def compare(
    benchmark: Any, cores: dict[str, EngineCore], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """Runs all settings in turn; medians go to `extra_info`, as ratios to the one without drafts."""
    rates: dict[str, list[float]] = {name: [] for name in cores}

    def run_all() -> None:
        for name, core in cores.items():
            rates[name].append(generate(core, prompts, params))

    run_all()  # captures steps
    for found in rates.values():
        found.clear()
    before = {name: core.stats() for name, core in cores.items()}
    benchmark.pedantic(run_all, rounds=NUM_ROUNDS)
    benchmark.extra_info["tokens_per_s_without"] = median(rates["without"])
    num_steps = {name: core.stats().step - before[name].step for name, core in cores.items()}
    for name in ("fixed", "adaptive"):
        stats = cores[name].stats()
        benchmark.extra_info[f"steps_{name}"] = num_steps[name] / num_steps["without"]
        num_drafts = stats.num_draft_tokens - before[name].num_draft_tokens
        num_accepted = stats.num_accepted_draft_tokens - before[name].num_accepted_draft_tokens
        benchmark.extra_info[f"speedup_{name}"] = median(rates[name]) / median(rates["without"])
        benchmark.extra_info[f"drafts_per_token_{name}"] = num_drafts / (NUM_ROUNDS * len(prompts) * NUM_OUTPUT_TOKENS)
        benchmark.extra_info[f"acceptance_rate_{name}"] = num_accepted / num_drafts if num_drafts else 0.0


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_random_weights(benchmark: Any, random_cores: dict[str, EngineCore], num_requests: int, workload: str) -> None:
    """GPT-2's shape: what right and wrong drafts gain and cost at most."""
    prompts = [[(31 * number + 7 * (place % 12)) % 50_000 for place in range(64)] for number in range(num_requests)]
    compare(benchmark, random_cores, prompts, WORKLOADS[workload])


@pytest.mark.parametrize("text", [STORY, CODE], ids=["story", "code"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_trained_weights(
    benchmark: Any, demo_cores: dict[str, EngineCore], num_requests: int, temperature: float, text: str
) -> None:
    """The demo model, on texts that differ in their length."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(
        pytest.importorskip("llmstack_demo_model").model_path()
    )
    token_ids = tokenizer.encode(text * 2)
    prompts = [token_ids[: len(token_ids) - number] for number in range(num_requests)]
    params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS)
    compare(benchmark, demo_cores, prompts, params)
