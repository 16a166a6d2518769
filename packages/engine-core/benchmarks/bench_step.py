"""Processor time of one decode step in the engine core: scheduling, the step log, hooks and the outputs' encoding.

As a script it prints the median microseconds of thread time per step, so that two versions can be run in turns:
`python bench_step.py echo 1 64 256` with `PYTHONPATH` set to the sources of either.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_engine_core import EngineConfig, SchedulerConfig
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.messages.protocol import ENGINE_MESSAGES
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

NUM_STEPS = 400
NUM_WARM_UPS = 20
PROMPT = [7, 8, 9, 10]
LIMITS = {"max_model_len": 512, "max_num_seqs": 256, "max_num_batched_tokens": 2048}


def demo_model_path() -> str:
    import llmstack_demo_model

    return str(llmstack_demo_model.model_path())


def stepping(runner: str, num_rows: int, num_tokens: int = 480) -> Callable[[], bytes]:
    """An engine core in the middle of `num_rows` decodes; each call computes a step and encodes its outputs."""
    model_path = "echo" if runner == "echo" else demo_model_path()
    config = EngineConfig(
        ModelRunnerConfig(model_path, **LIMITS), "echo" if runner == "echo" else "default", SchedulerConfig(**LIMITS)
    )
    core = build_engine_core(config)
    for index in range(num_rows):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=index)
        core.add_request(EngineCoreRequest(f"cmpl-0123456789abcdef0123456789abcdef-{index}", PROMPT, params))

    def step() -> bytes:
        if not core.has_unfinished_requests():
            raise RuntimeError("the requests have ended")
        return ENGINE_MESSAGES.encode(core.step())

    for _ in range(NUM_WARM_UPS):
        step()
    return step


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_decode_step(benchmark: BenchmarkFixture, num_rows: int) -> None:
    benchmark.pedantic(stepping("echo", num_rows), rounds=NUM_STEPS, iterations=1)


def thread_time_us(step: Callable[[], bytes]) -> float:
    """The median of ten spans of steps."""
    spans = []
    for _ in range(10):
        start_s = time.thread_time()
        for _ in range(NUM_STEPS // 10):
            step()
        spans.append((time.thread_time() - start_s) / (NUM_STEPS // 10) * 1e6)
    return statistics.median(spans)


def main(runner: str, *num_rows: str) -> None:
    for count in num_rows:
        print(f"{runner} {count} {thread_time_us(stepping(runner, int(count))):.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
