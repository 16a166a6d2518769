"""Small engine cores over the echoing runner, for tests of explanations."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, EngineCore, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, RequestStatus, SamplingParams, StepRecord

TICK_S = 0.000432
LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16}


class Ticks:
    """A clock that goes on by the same time with each look: a busy machine makes no step longer than others."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


def ticking(core: EngineCore) -> EngineCore:
    core.observers.events.clock = Ticks()
    core.observers.events.received_s = core.now_s()
    return core


def build(
    num_blocks: int = 64,
    *,
    max_prefill_tokens: int = 0,
    policy: str = "fcfs",
    record_steps: str | None = None,
    **changes: int,
) -> EngineCore:
    limits = LIMITS | changes
    config = EngineConfig(
        ModelRunnerConfig("echo", block_size=4, **limits), runner="echo",
        scheduler=SchedulerConfig(**limits, max_prefill_tokens=max_prefill_tokens, policy=policy),
        num_blocks=num_blocks, record_steps=record_steps,
    )  # fmt: skip
    return ticking(build_engine_core(config))


def run_with_a_yield(record_steps: str | None = None) -> EngineCore:
    """Two keys: the one has all four places, when a request of the other comes. The row of `r3` yields to it."""
    core = build(policy="fair", record_steps=record_steps)
    for number in range(6):
        add(core, f"r{number}", 4, max_tokens=20, first=number + 1, tenant="one")
    for _ in range(5):
        core.step()
    add(core, "other", 4, max_tokens=3, first=99, tenant="two")
    run(core)
    return core


def add(core: EngineCore, name: str, num_tokens: int, max_tokens: int = 4, first: int = 1, **values: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, [first, *range(2, num_tokens + 1)], params, **values))


def logged_core(path: Path) -> EngineCore:
    config = EngineConfig(
        ModelRunnerConfig("echo", block_size=4, **LIMITS), runner="echo", scheduler=SchedulerConfig(**LIMITS),
        num_blocks=64, record_steps=str(path),
    )  # fmt: skip
    return ticking(build_engine_core(config))


def run(core: EngineCore) -> None:
    while core.has_unfinished_requests():
        core.step()


def added_during_a_step(core: EngineCore, arrival_s: Callable[[StepRecord], float]) -> tuple[StepRecord, float]:
    """Adds `r`, which came at `arrival_s` of the step that has just ended; returns that step and when `r` came."""
    add(core, "long", 12)
    core.step()
    (step,) = core.recent_steps(0).steps
    add(core, "r", 8, first=99, arrival_time_s=arrival_s(step))
    (came_s,) = (one.time_s for one in core.recent_steps(0).events if one[:2] == ("r", RequestStatus.WAITING))
    run(core)
    return step, came_s
