"""DeepSeek and GLM-5 through the whole engine equal transformers: ranks, stages, blocks, chunks, forks and swaps."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny

from llmstack_demo_model import model_path
from llmstack_llm import LLM, SamplingParams

NUM_OUTPUT_TOKENS = 16
SHARED_PREFIX = [(7 * i + 3) % 97 for i in range(33)]
PROMPTS = [SHARED_PREFIX + [(11 * i + j) % 97 for j in range(1 + 5 * i)] for i in range(6)]
CONFIG: dict[str, Any] = tiny.DEEPSEEK | {"max_position_embeddings": 128}
# Contexts of 34 to 80 tokens, of which 16 are attended to. With fewer heads several keys of a token may score 0.
SPARSE = CONFIG | {"index_topk": 16, "index_n_heads": 24, "index_head_dim": 32}
SHARED = {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4, "n_group": 1, "topk_group": 1}
# With the seed of the weights: some of each model's continuations repeat, so that drafts are accepted.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("DeepseekV3", CONFIG, 1),
    "sparse": ("DeepseekV32", SPARSE, 1),
    "sparse, shared selections": ("GlmMoeDsa", SPARSE | SHARED, 7),
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
ENGINES: dict[str, dict[str, Any]] = {
    **{f"blocks of {size}": {"block_size": size} for size in (1, 8, 16)},
    **{f"chunks of {size}": {"max_num_batched_tokens": size, "max_num_seqs": 4} for size in (7, 23)},
    "preemption": {"num_kv_blocks": 24, "block_size": 4, "max_model_len": 80},
    "swaps": {"num_kv_blocks": 24, "block_size": 4, "max_model_len": 80, "swap_space": 0.001},
    "drafts": {"speculative_config": DRAFTS, "block_size": 8},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks of experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "speculative_config": DRAFTS},
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A random checkpoint, and what transformers continues each prompt with."""
    family, config, seed = FAMILIES[request.param]
    config_class, model_class = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    model = model_class(config_class(**config)).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
    folder = tmp_path_factory.mktemp("deepseek")
    model.save_pretrained(folder)
    continuations = []
    for prompt in PROMPTS:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        output = model.generate(
            torch.tensor([prompt]), attention_mask=mask, max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False
        )
        continuations.append(output[0, len(prompt) :].tolist())
    return folder, continuations


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logprobs_of(outputs: list[Any]) -> list[list[float]]:
    steps = [output.outputs[0].logprobs for output in outputs]
    return [[entry.logprob for by_token in own for entry in by_token.values()] for own in steps]


@pytest.fixture(scope="module")
def expected_logprobs(checkpoint: tuple[Path, list[list[int]]]) -> list[list[float]]:
    """Those of each prompt by itself, in one piece."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    found = []
    with LLM(str(checkpoint[0]), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        for prompt in PROMPTS:
            found += logprobs_of(llm.generate([prompt], params, use_tqdm=False))
    return found


def options_of(engine: str, folder: Path) -> dict[str, Any]:
    """Where only some layers have an indexer, a request has three block tables, and needs as many times the blocks."""
    options, config = ENGINES[engine], json.loads((folder / "config.json").read_text())
    if "shared" not in config.get("indexer_types", ()) or "num_kv_blocks" not in options:
        return options
    return options | {"num_kv_blocks": 3 * options["num_kv_blocks"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens_equal_transformers_and_bits_those_of_one_prompt_alone(
    checkpoint: tuple[Path, list[list[int]]], expected_logprobs: list[list[float]], engine: str
) -> None:
    folder, continuations = checkpoint
    options = options_of(engine, folder)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **options) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert tokens_of(outputs) == continuations
            has_bits = "tensor_parallel_size" not in options
            for own, expected in zip(logprobs_of(outputs), expected_logprobs, strict=True):
                assert own == (expected if has_bits else pytest.approx(expected, abs=1e-4))
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"] > 0
    assert (metrics["vllm:num_preemptions"] > 0) == (engine in ("preemption", "swaps"))
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0 or "speculative_config" not in options


def test_several_answers_and_beams_of_a_prompt_share_its_latents(checkpoint: tuple[Path, list[list[int]]]) -> None:
    folder, continuations = checkpoint
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, n=3)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, block_size=8) as llm:
        (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    assert [list(answer.token_ids) for answer in output.outputs] == [continuations[2]] * 3


@pytest.fixture(scope="module", params=["dense", "sparse"])
def chat_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the embedded model's tokenizer and template, as a user would have one."""
    source, folder = model_path(), tmp_path_factory.mktemp("chat")
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(2)
    family, config, _ = FAMILIES[request.param]
    config_class, model_class = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 512}
    model_class(config_class(**(config | sizes))).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return folder


def test_a_chat_finds_its_beginning_and_goes_on_after_the_engine_was_killed(
    chat_folder: Path, serve: Callable[..., Any]
) -> None:
    with serve(str(chat_folder), "--dtype", "float32", "--served-model-name", "deepseek") as server:
        messages = [{"role": "user", "content": "Tell me a story about a bear, a fox and an owl. " * 3}]

        def ask(kill: bool) -> tuple[str, Any]:
            stream = server.client.chat.completions.create(
                model="deepseek", messages=messages, max_tokens=120, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            text, usage = "", None
            for number, chunk in enumerate(stream):
                if kill and number == 5:
                    os.kill(server.engine_pid(), signal.SIGKILL)
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            return text, usage

        first, usage = ask(kill=False)
        assert usage.completion_tokens == 120
        assert usage.prompt_tokens_details.cached_tokens == 0
        again, usage = ask(kill=False)
        assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 16
        disturbed, _ = ask(kill=True)
        assert first == again == disturbed
        assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == 1
