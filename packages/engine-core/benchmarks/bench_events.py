"""What hooks and the recorder add to a step of 256 decodes over a runner that computes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, EventHook, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

NUM_ROWS = 256
LIMITS = {"max_model_len": 8192, "max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 8192}


class Idle(EventHook):
    """Receives everything and does nothing."""


@pytest.mark.benchmark(group="a step of 256 rows")
@pytest.mark.parametrize(
    ("hooks", "options"),
    [
        ([], {"num_recorded_steps": 0, "log_stats": False}),
        ([], {"num_recorded_steps": 0}),
        ([], {}),
        ([Idle()], {}),
        ([], {"block_metrics_sample": 0.01}),
    ],
    ids=["nothing", "statistics", "statistics, recorder", "and a hook", "and blocks"],
)
def test_step(benchmark: Any, hooks: list[EventHook], options: dict[str, Any]) -> None:
    model = ModelRunnerConfig("echo?num_available_blocks=150000", **LIMITS)
    config = EngineConfig(
        model, runner="echo", scheduler=SchedulerConfig(**LIMITS), num_blocks=140_000, step_log_bytes=0, **options
    )
    core = build_engine_core(config, hooks)
    for index in range(NUM_ROWS):
        params = SamplingParams(max_tokens=8000, seed=0, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"cmpl-{index:032d}-0", [1, 2, 3], params))
    core.step()
    benchmark.pedantic(core.step, rounds=1000, warmup_rounds=50)
