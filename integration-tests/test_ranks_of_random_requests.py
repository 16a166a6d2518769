"""Random requests of every kind at once: several ranks give the tokens of one, and stages its bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from quantized_demo import write_quantized_demo

from llmstack_demo_model import model_path
from llmstack_llm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from llmstack_model_runner.testing import write_random_adapter

TARGETS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
STORY = "Once upon a time there was a small bear who lived in a green wood and looked for honey every day. "
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,12}( [a-z]{2,9}){1,4}"},
    {"choice": ["a bear", "a fox", "an old owl"]},
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}},
)
NUM_BATCHES = 4
DRAFT_MODEL = {"model": str(model_path()), "num_speculative_tokens": 3, "is_adaptive": False}


def params_of(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.randrange(4, 24), "seed": rng.randrange(1000), "temperature": 0.0}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.4, 0.9, 1.3]), "top_p": rng.choice([1.0, 0.8])}
        options |= {"top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.05]), "n": rng.randrange(1, 4)}
    if rng.random() < 0.3:
        options |= {"frequency_penalty": 0.7, "presence_penalty": -0.2, "repetition_penalty": 1.1}
    if rng.random() < 0.3:
        options |= {"logit_bias": {rng.randrange(500): 4.0}, "min_tokens": 3, "stop": ["zz"]}
    if rng.random() < 0.4:
        options["logprobs"] = rng.randrange(4)
    if rng.random() < 0.2:
        options["prompt_logprobs"] = rng.randrange(3)
    if rng.random() < 0.3:
        options["structured_outputs"] = StructuredOutputsParams(**rng.choice(CONSTRAINTS))
    return SamplingParams(**options)


def requests_of(seed: int, adapters: list[LoRARequest]) -> tuple[list[Any], list[SamplingParams], list[Any]]:
    """Prompts that share beginnings, so that later ones find them cached; more than the pool can hold."""
    rng = random.Random(seed)
    count = 12
    prompts = [
        STORY[: rng.randrange(20, 90)] * rng.randrange(1, 3) + rng.choice(["", "The bear", "12345 12345 12345"])
        for _ in range(count)
    ]
    chosen = [rng.choice([None, *adapters]) for _ in range(count)]
    return prompts, [params_of(rng) for _ in range(count)], chosen


Answer = tuple[list[tuple[list[int], str | None]], list[float]]


def answers(llm: LLM, seed: int, adapters: list[LoRARequest]) -> list[Answer]:
    """Tokens and ends of every completion, and all log-probabilities."""
    prompts, params, chosen = requests_of(seed, adapters)
    found = []
    for output in llm.generate(prompts, params, lora_request=chosen, use_tqdm=False):
        texts = [(list(one.token_ids), one.finish_reason) for one in output.outputs]
        entries = [entry for one in output.outputs for entry in one.logprobs or ()]
        entries += [entry for entry in output.prompt_logprobs or () if entry is not None]
        found.append((texts, [entry.logprob for by_token in entries for entry in by_token.values()]))
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "quantized"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[LoRARequest]]:
    folder = tmp_path_factory.mktemp("models")
    adapters = [
        LoRARequest(f"a{seed}", seed, str(write_random_adapter(folder / f"{seed}", model_path(), TARGETS, seed)))
        for seed in (1, 2)
    ]
    path = write_quantized_demo(folder / "quantized") if request.param else model_path()
    return str(path), adapters


def engine(model: str, **options: Any) -> LLM:
    return LLM(
        model, dtype="float32", enable_lora=True, max_loras=2, max_model_len=128, num_kv_blocks=13, max_num_seqs=6,
        max_num_batched_tokens=48, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: tuple[str, list[LoRARequest]]) -> Iterator[list[list[Answer]]]:
    with engine(model[0]) as llm:
        yield [answers(llm, seed, model[1]) for seed in range(NUM_BATCHES)]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": DRAFT_MODEL},
        {"tensor_parallel_size": 2, "speculative_config": DRAFT_MODEL},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_random_requests_have_the_tokens_of_one_rank(
    options: dict[str, Any], model: tuple[str, list[LoRARequest]], expected: list[list[Answer]]
) -> None:
    has_bits = "tensor_parallel_size" not in options
    with engine(model[0], **options) as llm:
        for seed, batch in enumerate(expected):
            for (texts, logprobs), (others, theirs) in zip(answers(llm, seed, model[1]), batch, strict=True):
                assert texts == others
                assert logprobs == (theirs if has_bits else pytest.approx(theirs, abs=3e-4))
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:prefix_cache_hits"] > 0
    assert metrics.get("vllm:spec_decode_num_accepted_tokens", 0) > 0 or "speculative_config" not in options
