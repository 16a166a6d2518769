"""Sliding windows free the blocks they have passed, and no token differs from a run that keeps them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import state_engine
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny

from llmstack_core_scheduler import SpeculativeConfig
from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_step_log import read_step_log
from llmstack_step_log.control_plane import CacheConfig, GroupConfig
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreRequest,
    ModelRunnerConfig,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    SchedulerOutput,
)

VOCAB_SIZE = 97
NULL_BLOCK = 0
BASE: dict[str, Any] = (
    tiny.LLAMA | tiny.NO_ENDS | {"head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2}
)
GEMMA3 = BASE | {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": 32, "query_pre_attn_scalar": 5}
QWEN2 = BASE | {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 32}
MODELS = {
    "MistralForCausalLM": BASE | {"sliding_window": 32},
    "Gemma3ForCausalLM": GEMMA3,
    "Qwen2ForCausalLM": QWEN2,
}
HOLDS = {"MistralForCausalLM": [3], "Gemma3ForCausalLM": [3, 3, 3, 3, 3, 3, 26], "Qwen2ForCausalLM": [26, 3, 3, 3]}
"""Blocks of 16 tokens by group, after 402 tokens with a window of 32: 26 without one."""

LIMITS = {"max_model_len": 448, "max_num_seqs": 6, "max_num_batched_tokens": 64}
SHARED = [(7 * i + 3) % VOCAB_SIZE for i in range(150)]
PROMPTS = [SHARED[: 40 * i] + [(11 * i + j) % VOCAB_SIZE for j in range(5 + 9 * i)] for i in range(4)]
NUM_OUTPUT_TOKENS = 24
LONGEST = max(map(len, PROMPTS)) + NUM_OUTPUT_TOKENS


def write_checkpoint(folder: Path, name: str) -> Any:
    torch.manual_seed(1)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**MODELS[name])).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_checkpoint(folder, request.param)


def build(folder: Path, num_blocks: int = 600, *, is_hybrid: bool = True, **changes: Any) -> EngineCore:
    scheduler = SchedulerConfig(**LIMITS, speculative=changes.pop("speculative", None))
    model = ModelRunnerConfig(
        str(folder),
        dtype="float32",
        device="cpu",
        enable_hybrid_kv_cache=is_hybrid,
        max_num_drafts=scheduler.max_num_drafts,
        **LIMITS,
    )
    model = replace(model, block_size=changes.pop("block_size", 16))
    return build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=num_blocks, **changes))


def requests() -> Iterator[EngineCoreRequest]:
    return state_engine.requests(PROMPTS, NUM_OUTPUT_TOKENS)


def run(core: EngineCore, *arrivals: EngineCoreRequest) -> dict[str, list[Any]]:
    return state_engine.run(core, *(arrivals or requests()))


def tokens_of(answers: dict[str, list[Any]], request_id: str) -> list[int]:
    return [token_id for token_id, _ in answers[request_id]]


@pytest.fixture(scope="module")
def plain_answers(checkpoint: tuple[str, Path, Any]) -> dict[str, list[Any]]:
    """Of an engine whose layers keep all blocks, and finds no prefixes."""
    core = build(checkpoint[1], is_hybrid=False, enable_prefix_caching=False)
    answers = run(core)
    assert core.stats().num_preemptions == 0
    core.shutdown()
    return answers


def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[str, Path, Any], plain_answers: dict[str, list[Any]]
) -> None:
    core = build(checkpoint[1])
    answers = run(core)
    core.shutdown()
    for number, prompt in enumerate(PROMPTS):
        attention_mask = torch.ones(1, len(prompt), dtype=torch.long)
        output = checkpoint[2].generate(
            torch.tensor([prompt]), attention_mask=attention_mask, max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False
        )
        assert tokens_of(answers, f"0_{number}") == output[0, len(prompt) :].tolist()
    assert answers == plain_answers  # the sampled ones and all log-probabilities too


def test_a_request_holds_the_blocks_that_its_windows_look_at(checkpoint: tuple[str, Path, Any]) -> None:
    name, folder, _ = checkpoint
    core = build(folder)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)
    core.add_request(EngineCoreRequest("long", [i % VOCAB_SIZE for i in range(380)], params))
    num_tokens = 0
    while num_tokens < 402 - 380 + 1:  # the last one that was sampled has no keys yet
        num_tokens += sum(len(output.new_token_ids) for output in core.step().outputs)
    stats = core.stats()
    assert stats.num_blocks - stats.num_free_blocks == sum(HOLDS[name])
    core.abort_requests(["long"])
    core.step()
    assert core.stats().num_free_blocks == core.stats().num_blocks == 599
    core.shutdown()


def poison_unheld_blocks(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Overwrites every block that no request holds, the null block too, with NaN before each step.

    Returns:
        Request id to the blocks that windows of the request have passed, and that were overwritten while it ran.
    """
    runner: Any = core.runner
    logged: Any = core._scheduler
    scheduler = logged._scheduler  # below the one that writes the step log
    manager, execute_model = scheduler._kv_cache_manager, runner.execute_model
    once_held: dict[str, set[int]] = {}
    poisoned: dict[str, set[int]] = {}

    def execute_with_poison(scheduled: SchedulerOutput) -> Any:
        request_ids = [request_id for request_id in scheduler._requests if manager.num_held_blocks(request_id)]
        tables = {request_id: manager.block_tables(request_id) for request_id in request_ids}
        held = {block_id for by_group in tables.values() for table in by_group for block_id in table} - {NULL_BLOCK}
        for request_id, by_group in tables.items():
            blocks = once_held.setdefault(request_id, set())
            blocks.update(block_id for table in by_group for block_id in table if block_id != NULL_BLOCK)
            poisoned.setdefault(request_id, set()).update(blocks - held)
        unheld = [block_id for block_id in range(manager.num_blocks + 1) if block_id not in held]
        for keys, values in runner._kv_caches:
            keys[unheld] = values[unheld] = torch.nan
        return execute_model(scheduled)

    monkeypatch.setattr(runner, "execute_model", execute_with_poison)
    return poisoned


def test_no_token_comes_from_a_block_that_a_window_has_passed(
    checkpoint: tuple[str, Path, Any], plain_answers: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = build(checkpoint[1], enable_prefix_caching=False)
    poisoned = poison_unheld_blocks(core, monkeypatch)
    assert run(core) == plain_answers
    core.shutdown()
    assert all(poisoned[f"0_{number}"] for number in (1, 2, 3))  # those that are longer than a window and its blocks


def test_a_disabled_hybrid_cache_keeps_all_blocks_and_says_so(checkpoint: tuple[str, Path, Any]) -> None:
    core = build(checkpoint[1], is_hybrid=False)
    assert "--disable-hybrid-kv-cache-manager" in core.ready.backends["kv_cache"]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
    core.add_request(EngineCoreRequest("long", [i % VOCAB_SIZE for i in range(400)], params))
    while not any(output.new_token_ids for output in core.step().outputs):
        pass
    stats = core.stats()
    assert stats.num_blocks - stats.num_free_blocks == 25
    core.shutdown()


@pytest.mark.parametrize(
    ("block_size", "num_host_blocks", "async_scheduling"),
    [
        (4, 400, True),
        (16, 0, False),
        *(pytest.param(*values, marks=pytest.mark.full) for values in product((4, 16), (0, 400), (False, True))),
    ],
)
def test_preemption_swaps_forks_and_hits_change_no_token(
    checkpoint: tuple[str, Path, Any],
    plain_answers: dict[str, list[Any]],
    tmp_path: Path,
    num_host_blocks: int,
    async_scheduling: bool,
    block_size: int,
) -> None:
    name, folder, _ = checkpoint
    windows = tuple(0 if num_blocks == 26 else 32 for num_blocks in HOLDS[name])
    cache = CacheConfig(1, block_size, groups=tuple(GroupConfig(sliding_window=window) for window in windows))
    num_blocks = 1 + cache.num_blocks_needed(LONGEST, SchedulerConfig(**LIMITS))  # one request fits, two do not
    log_path = tmp_path / "run.steps"
    core = build(
        folder,
        num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        async_scheduling=async_scheduling,
        record_steps=str(log_path),
    )
    assert run(core) == plain_answers
    again = run(core, *(replace(request, request_id=f"again_{request.request_id}") for request in requests()))
    assert {request_id.removeprefix("again_"): sampled for request_id, sampled in again.items()} == plain_answers
    stats = core.stats()
    core.shutdown()
    assert stats.num_free_blocks == stats.num_blocks == num_blocks - 1
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert verify(read_step_log(log_path)).num_steps > 20


def test_drafts_change_no_token(checkpoint: tuple[str, Path, Any]) -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=120, ignore_eos=True, logprobs=0)
    request = EngineCoreRequest("a", SHARED[:97] * 2, params)
    answers = []
    for changes in ({"is_hybrid": False}, {}, {"speculative": SpeculativeConfig("ngram", 4, 2, 1)}):
        core = build(checkpoint[1], **changes)
        answers.append(run(core, request))
        stats = core.stats()
        core.shutdown()
    assert answers[0] == answers[1] == answers[2]
    assert stats.num_accepted_draft_tokens > 0


def test_pooled_vectors_are_those_of_a_cache_that_keeps_all_blocks(checkpoint: tuple[str, Path, Any]) -> None:
    vectors = []
    for is_hybrid in (False, True):
        core = build(checkpoint[1], is_hybrid=is_hybrid)
        params = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
        pooling_params = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)
        core.add_request(EngineCoreRequest("pooled", SHARED, params, pooling_params=pooling_params))
        pooled = []
        while core.has_unfinished_requests():
            pooled += [output.pooled for output in core.step().outputs]
        vectors.append(np.frombuffer(b"".join(pooled), dtype=np.float32))
        core.shutdown()
    assert np.array_equal(*vectors)
    assert len(vectors[0]) == 32
