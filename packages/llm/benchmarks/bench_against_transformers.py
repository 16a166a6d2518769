"""What the engine is for, as ratios in one run: to `transformers.generate` one by one, and to no KV cache.

GPT-2's shape with random weights in bfloat16, greedy, end of text ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import LLM, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("llmstack_model_runner")

NUM_REQUESTS = 16
NUM_PROMPT_TOKENS = 64
NUM_OUTPUT_TOKENS = 32
LONG_CONTEXT = 992


@pytest.fixture(scope="module")
def config() -> Any:
    return transformers.GPT2Config(bos_token_id=None, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(config: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    (path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True) as made:
        yield made


@pytest.fixture(scope="module")
def reference(config: Any) -> Any:
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16).eval()


def prompts(num_tokens: int, num_prompts: int) -> list[list[int]]:
    return [[(31 * i + 7 * j) % 50_000 for j in range(num_tokens)] for i in range(num_prompts)]


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def generate_one_by_one(reference: Any) -> float:
    """Output tokens per second of transformers, one request after the other."""
    started_s = time.perf_counter()
    for prompt in prompts(NUM_PROMPT_TOKENS, NUM_REQUESTS // 4):
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
        )
    return NUM_REQUESTS // 4 * NUM_OUTPUT_TOKENS / (time.perf_counter() - started_s)


def test_a_batch_against_transformers_one_by_one(benchmark: Any, llm: LLM, reference: Any) -> None:
    rates: list[float] = []

    def run() -> None:
        rates.append(generate_one_by_one(reference))  # interleaved: the machine's speed drifts
        llm.reset_prefix_cache()
        started_s = time.perf_counter()
        llm.generate(prompts(NUM_PROMPT_TOKENS, NUM_REQUESTS), params(NUM_OUTPUT_TOKENS), use_tqdm=False)
        ours.append(NUM_REQUESTS * NUM_OUTPUT_TOKENS / (time.perf_counter() - started_s))

    ours: list[float] = []
    benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    middle = len(rates) // 2
    benchmark.extra_info["tokens_per_s"] = round(sorted(ours)[middle], 1)
    benchmark.extra_info["transformers_tokens_per_s"] = round(sorted(rates)[middle], 1)
    benchmark.extra_info["ratio"] = round(sorted(ours)[middle] / sorted(rates)[middle], 2)


def test_decoding_with_and_without_a_kv_cache(benchmark: Any, llm: LLM) -> None:
    """A token at a context of about 1,000: from the cache, against computing the whole context again."""
    (prompt,) = prompts(LONG_CONTEXT, 1)
    cached_s: list[float] = []
    recomputed_s: list[float] = []

    def run() -> None:
        llm.reset_prefix_cache()
        started_s = time.perf_counter()
        llm.generate([prompt], params(1), use_tqdm=False)
        recomputed_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        llm.generate([prompt], params(25), use_tqdm=False)  # the prompt is a prefix hit
        cached_s.append((time.perf_counter() - started_s) / 25)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    middle = len(cached_s) // 2
    benchmark.extra_info["ms_per_token_cached"] = round(sorted(cached_s)[middle] * 1000, 2)
    benchmark.extra_info["ms_per_token_recomputed"] = round(sorted(recomputed_s)[middle] * 1000, 2)
    benchmark.extra_info["ratio"] = round(sorted(recomputed_s)[middle] / sorted(cached_s)[middle], 1)
