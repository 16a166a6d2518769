"""Prompts that are cut for the stages of a model: no token and no log-probability differs from one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_helpers.families import write_family

from llmstack_engine_core import EngineConfig, SchedulerConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
Outputs = dict[str, list[tuple[list[int], str]]]


def outputs_of(folder: Path, num_stages: int, min_stage_tokens: int = 0) -> tuple[Outputs, int]:
    """The tokens of a few requests with their log-probabilities, and the tokens of the largest step."""
    sizes = {"pipeline_parallel_size": num_stages}
    model = ModelRunnerConfig(str(folder), device="cpu", dtype="float32", **LIMITS, **sizes)
    scheduler = SchedulerConfig(**LIMITS, **sizes, min_stage_tokens=min_stage_tokens)
    runner = "default" if num_stages == 1 else "parallel"
    core = build_engine_core(EngineConfig(model, runner=runner, scheduler=scheduler, num_blocks=32))
    found: Outputs = {}
    largest = 0
    try:
        for index in range(4):
            prompt = [(7 * place + 3 + index) % 90 for place in range(25 + 8 * index)]
            params = SamplingParams(max_tokens=8, temperature=0.8, seed=index, ignore_eos=True, logprobs=2)
            core.add_request(EngineCoreRequest(f"request-{index}", prompt, params))
        while core.has_unfinished_requests():
            step = core.step()
            if step.scheduler_stats is not None:
                largest = max(largest, step.scheduler_stats.num_scheduled_tokens)
            for output in step.outputs:
                found.setdefault(output.request_id, []).append((output.new_token_ids, str(output.logprobs)))
    finally:
        core.shutdown()
    return found, largest


@pytest.mark.full  # packages/engine-core/tests/test_pipeline_scheduling.py has the schedules
def test_prompts_in_small_parts_give_the_bits_of_one_process(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama")
    alone, largest = outputs_of(folder, 1)
    assert largest == 64
    staged, largest = outputs_of(folder, 2, min_stage_tokens=9)
    assert staged == alone
    assert largest < 20
