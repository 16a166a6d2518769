"""Random schedules, which are the same for any runner."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EncoderWork, MediaItem, ModelRunnerConfig, SamplingParams, TokenLogprobs
from parallel_helpers.thread_peers import ThreadPeers

NUM_BLOCKS = 160


@dataclass
class Run:
    """What a schedule gave: tokens by request, and the log-probabilities of every step."""

    outputs: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


def make_config(folder: Path, **changes: Any) -> ModelRunnerConfig:
    """A configuration for a small model on the CPU."""
    limits = {"max_model_len": 64, "max_num_batched_tokens": 96, "max_num_seqs": 6, "block_size": 4}
    return ModelRunnerConfig(str(folder), **{"device": "cpu", "dtype": "float32", **limits, **changes})


def run_schedule(config: ModelRunnerConfig, seed: int, adapters: Mapping[str, Path] = MappingProxyType({})) -> Run:
    """Chunked prompts, decodes, preemptions and prefix hits; a request in two has a seed, one in two is greedy."""
    runner = ModelRunner(config) if config.num_ranks == 1 else ParallelRunner(config, ThreadPeers)
    try:
        runner.load_model()
        assert runner.available_kv_bytes() > 0
        runner.initialize_kv_cache(NUM_BLOCKS)
        add_adapters(runner, adapters)
        return drive(runner, seed, [None, *adapters])
    finally:
        runner.shutdown()


def run_media(config: ModelRunnerConfig, items: Sequence[MediaItem], seed: int, token_ids: Sequence[int] = ()) -> Run:
    """Two requests with the same items, in chunks; layers of the items come in parts of one or two.

    `token_ids` are those at places 4 to 12 of the prompts.
    """
    runner = ModelRunner(config) if config.num_ranks == 1 else ParallelRunner(config, ThreadPeers)
    try:
        runner.load_model()
        assert runner.available_kv_bytes() > 0
        runner.initialize_kv_cache(NUM_BLOCKS)
        return _drive_media(runner, [*enumerate(items, 1)], random.Random(seed), token_ids)
    finally:
        runner.shutdown()


def _drive_media(
    runner: Any, numbered: list[tuple[int, MediaItem]], rng: random.Random, token_ids: Sequence[int]
) -> Run:
    driver = StepDriver(runner, NUM_BLOCKS)
    run = Run(driver.outputs)
    for index in range(2):
        prompt = [(7 * place + 3) % 90 for place in range(35 - 17 * index if len(numbered) > 1 else 18)]
        own = [(number, item) for number, item in numbered if item.end <= len(prompt)]
        for _, item in own:
            prompt[item.offset : item.end] = [0] * item.num_tokens
        if token_ids:
            prompt[4:13] = token_ids
        driver.add(f"request-{index}", prompt, SamplingParams(temperature=0.0, logprobs=2), media=tuple(own))
    done, parts = {number: 0 for number, _ in numbered}, random.Random(1)
    num_layers = {number: 0 if item.kind == "embeds" else 3 for number, item in numbered}
    for number, item in numbered:
        while not done[number] or done[number] < num_layers[number]:
            count = min(parts.randint(1, 2), num_layers[number] - done[number])
            part = EncoderWork(number, done[number], count, None if done[number] else item)
            driver.step({}, encoder_work=[part])
            done[number] += max(count, 1)
    for _ in range(10):
        output = driver.step({name: rng.randint(1, driver.num_left(name)) for name in driver.outputs})
        for request_id, entries in output.logprobs.items():
            run.logprobs.setdefault(request_id, []).extend(entries)
    assert not driver.errors
    return run


def add_adapters(runner: ModelRunner | ParallelRunner, adapters: Mapping[str, Path]) -> None:
    for identity, path in adapters.items():
        runner.announce_adapter(identity, str(path))
        runner.add_adapter(identity, runner.read_adapter(identity, str(path)))


def drive(runner: Any, seed: int, adapters: Sequence[str | None] = (None,), num_steps: int = 24) -> Run:
    """The schedule in a runner without rows, which has none again at its end."""
    rng = random.Random(seed)
    driver = StepDriver(runner, NUM_BLOCKS)
    run = Run(driver.outputs)
    prompt = [rng.randrange(97) for _ in range(18)]
    ids = [f"request-{index}" for index in range(4)]
    for index, request_id in enumerate(ids):
        own = prompt[: rng.randrange(6, 18)] + [rng.randrange(97) for _ in range(rng.randrange(1, 6))]
        temperature = 0.0 if index % 2 else 0.9
        params = SamplingParams(temperature=temperature, seed=index, logprobs=2, top_p=0.9)
        driver.add(request_id, own, params, lora_name=adapters[index % len(adapters)])
    has_begun: set[str] = set()
    for _ in range(num_steps):
        if rng.random() < 0.15 and has_begun:
            victim = rng.choice(sorted(has_begun))
            driver.preempt(victim)
            has_begun.discard(victim)
        chosen = {}
        for request_id in rng.sample(ids, rng.randrange(1, len(ids) + 1)):
            is_shared = request_id not in has_begun and has_begun and rng.random() < 0.5
            if is_shared and len(adapters) == 1:  # prefixes are of one adapter alone
                driver.share(request_id, min(has_begun))
            has_begun.add(request_id)
            num_left = driver.num_left(request_id)
            chosen[request_id] = num_left if rng.random() < 0.6 else rng.randrange(1, num_left + 1)
        output = driver.step(chosen)
        for request_id, entries in output.logprobs.items():
            run.logprobs.setdefault(request_id, []).extend(entries)
    for request_id in ids:
        driver.remove(request_id)
    driver.step({})
    return run


def largest_difference(run: Run, other: Run) -> float:
    """Between the log-probabilities of two runs, whose tokens must be equal."""
    assert run.outputs == other.outputs
    assert run.logprobs.keys() == other.logprobs.keys()
    pairs = [
        (mine, theirs)
        for request_id, entries in run.logprobs.items()
        for mine, theirs in zip(entries, other.logprobs[request_id], strict=True)
    ]
    return max(abs(mine.logprobs[0] - theirs.logprobs[0]) for mine, theirs in pairs)
