"""Requests that go on in another engine core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import ModelRunnerConfig, SamplingParams
from parallel_helpers.schedules import NUM_BLOCKS, add_adapters
from parallel_helpers.thread_peers import ThreadPeers

NUM_TOKENS = 10


def check_another_engine_core(config: ModelRunnerConfig, adapters: Mapping[str, Path] = MappingProxyType({})) -> None:
    """A request goes on in a runner that has read the checkpoint again, as after a crash; with the first adapter."""
    params = SamplingParams(temperature=0.8, seed=5)
    adapter = next(iter(adapters), None)
    prompt = [5, 17, 2, 44, 8, 1, 30]

    @contextmanager
    def started() -> Iterator[StepDriver]:
        runner = ModelRunner(config) if config.num_ranks == 1 else ParallelRunner(config, ThreadPeers)
        try:
            runner.load_model()
            assert runner.available_kv_bytes() > 0
            runner.initialize_kv_cache(NUM_BLOCKS)
            add_adapters(runner, adapters)
            yield StepDriver(runner, NUM_BLOCKS)
        finally:
            runner.shutdown()

    with started() as first:
        first.add("a", prompt, params, lora_name=adapter)
        whole = list(first.run(NUM_TOKENS)["a"])
    with started() as second:
        second.add("a", prompt, params, lora_name=adapter)
        second.outputs["a"].extend(whole[:4])  # what a journal has
        second.preempt("a")
        assert second.run(NUM_TOKENS - 4)["a"] == whole
