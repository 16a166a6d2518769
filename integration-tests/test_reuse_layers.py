"""Every layer is useful alone: in another engine, over a fake, without its neighbours, without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_kv_cache import KVCacheManager
from llmstack_types import (
    EngineCoreRequest,
    FinishReason,
    ModelRunnerConfig,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)


class ForeignEngine:
    """Another engine in forty lines: one sequence at a time, a dictionary as memory, our KV-cache manager."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = KVCacheManager(num_blocks=num_blocks, block_size=block_size)
        self.memory: dict[int, int] = {}  # slot -> the token whose "KV" is there
        self.num_computed = 0

    def slot(self, name: str, position: int) -> int:
        table = self.cache.block_table(name)
        return table[position // self.cache.block_size] * self.cache.block_size + position % self.cache.block_size

    def next_token(self, name: str, num_tokens: int) -> int:
        """The 'model': a hash of the whole context, read back from the cache."""
        context = [self.memory[self.slot(name, position)] for position in range(num_tokens)]
        return (sum((i + 1) * token for i, token in enumerate(context)) + 7) % 97

    def generate(self, name: str, prompt: list[int], num_new: int) -> list[int] | None:
        blocks, num_computed = self.cache.get_computed_blocks(name, prompt)
        tokens = list(prompt)
        if self.cache.allocate_slots(name, len(tokens), blocks) is None:
            return None
        for _ in range(num_new):
            for position in range(num_computed, len(tokens)):
                self.memory[self.slot(name, position)] = tokens[position]
                self.num_computed += 1
            num_computed = len(tokens)
            self.cache.cache_blocks(name, tokens, num_computed)
            tokens.append(self.next_token(name, num_computed))
            if self.cache.allocate_slots(name, len(tokens)) is None:
                self.cache.free(name)
                return None
        self.cache.free(name)
        return tokens[len(prompt) :]


def test_the_kv_cache_manager_serves_a_foreign_engine() -> None:
    engine, prompt = ForeignEngine(num_blocks=32, block_size=4), list(range(1, 22))
    first = engine.generate("a", prompt, 10)
    cost_of_first, engine.num_computed = engine.num_computed, 0
    second = engine.generate("b", prompt, 10)
    assert first == second == ForeignEngine(num_blocks=32, block_size=4).generate("c", prompt, 10)
    assert engine.num_computed == cost_of_first - 20  # five whole blocks of the prompt were found
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    engine.cache.check_integrity()


def test_a_foreign_engine_that_runs_out_of_blocks_gets_none_and_loses_nothing() -> None:
    engine = ForeignEngine(num_blocks=3, block_size=4)
    assert engine.generate("big", list(range(40)), 1) is None
    assert engine.generate("grows", list(range(10)), 10) is None
    assert engine.cache.num_free_blocks == 3


def test_the_scheduler_runs_over_a_fake_runner() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        KVCacheManager(num_blocks=32, block_size=4),
    )
    for i in range(6):
        params = SamplingParams(max_tokens=3, temperature=0, seed=0)
        scheduler.add_request(EngineCoreRequest(f"r{i}", list(range(1, 8 + i)), params))
    known = {f"r{i}": 7 + i for i in range(6)}  # the fake runner's only state: how many tokens each request has
    finished: list[str] = []
    for step in range(100):
        if not scheduler.has_unfinished_requests():
            break
        plan = scheduler.schedule(float(step))
        assert plan.total_num_scheduled_tokens <= 16
        assert len(plan.scheduled_requests) <= 4
        sampled = []
        for row in plan.scheduled_requests:
            is_last_chunk = row.num_computed_tokens + row.num_scheduled_tokens == known[row.request_id]
            sampled.append([42] if is_last_chunk else [])
            known[row.request_id] += is_last_chunk
        output = ModelRunnerOutput([row.request_id for row in plan.scheduled_requests], sampled)
        for result in scheduler.update_from_output(plan, output, float(step)).outputs:
            if result.finish_reason is not None:
                assert result.finish_reason is FinishReason.LENGTH
                finished.append(result.request_id)
    assert sorted(finished) == sorted(known)
    assert scheduler.stats().num_free_blocks == 32


def test_the_model_runner_runs_without_a_scheduler() -> None:
    from llmstack_demo_model import model_path
    from llmstack_model_runner.model_runner import ModelRunner

    runner = ModelRunner(ModelRunnerConfig(str(model_path()), max_model_len=64, max_num_batched_tokens=64))
    runner.load_model()
    runner.initialize_kv_cache(num_blocks=8)
    params = SamplingParams(temperature=0, max_tokens=8, seed=0)
    prompt = [10, 20, 30, 40, 50]
    plan = SchedulerOutput(
        step=0,
        new_requests=[NewRequest("r", prompt, len(prompt), params)],
        scheduled_requests=[ScheduledRequest("r", 0, 5, [3])],
        total_num_scheduled_tokens=5,
    )
    tokens = runner.execute_model(plan).result().sampled_token_ids[0]
    for step in range(1, 8):
        row = ScheduledRequest("r", 4 + step, 1, [])
        tokens += runner.execute_model(SchedulerOutput(step, [], [row], [], 1)).result().sampled_token_ids[0]
    whole = SchedulerOutput(
        step=8,
        new_requests=[NewRequest("again", [*[10, 20, 30, 40, 50], *tokens[:-1]], 5, params)],
        scheduled_requests=[ScheduledRequest("again", 0, 12, [6])],
        removed_request_ids=["r"],
        total_num_scheduled_tokens=12,
    )
    assert runner.execute_model(whole).result().sampled_token_ids == [tokens[-1:]]
    runner.shutdown()


def test_the_engine_core_echoes_with_torch_made_unimportable() -> None:
    script = textwrap.dedent("""
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None  # as if they were not installed
        from llmstack_core_scheduler import SchedulerConfig
        from llmstack_engine_core import EngineConfig, build_engine_core
        from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

        config = EngineConfig(
            runner="llmstack_engine_core.testing:EchoModelRunner",
            model=ModelRunnerConfig(model_path="none", max_model_len=64),
            scheduler=SchedulerConfig(max_model_len=64),
            num_blocks=16,
        )
        core = build_engine_core(config)
        core.add_request(EngineCoreRequest("r", [5, 6, 7], SamplingParams(max_tokens=4, seed=0)))
        tokens = []
        while core.has_unfinished_requests():
            for output in core.step().outputs:
                tokens += output.new_token_ids
        print(tokens)
    """)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=60
    )
    assert result.stdout.strip() == "[5, 6, 7, 5]", result.stderr
