"""Audits of prefix hits: a wrong block is found and ends, a right one is never reported, and requests go first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from engine_core_helpers.cache_runner import BLOCK_SIZE, VOCAB_SIZE, CacheRunner

from llmstack_core_scheduler import Scheduler
from llmstack_engine_core import EngineConfig, SchedulerConfig, build_engine_core
from llmstack_engine_core.audits import Audits, is_close
from llmstack_engine_core.build import make_stages
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.events import EventBus
from llmstack_engine_core.observers import Observers
from llmstack_engine_core.structured_output import LazyBackend
from llmstack_step_log import LoggedScheduler, LogHeader, RecordedRun, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig, build_cache
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreRequest,
    EngineReady,
    EngineStartError,
    ModelRunnerConfig,
    SamplingParams,
    TokenLogprobs,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
NUM_HIT_TOKENS = 12


class Rig:
    """An engine core over `CacheRunner` that audits, whose log is kept."""

    def __init__(
        self, share: float = 1.0, *, num_blocks: int = 256, is_async: bool = False, max_num_batched_tokens: int = 64
    ) -> None:
        config = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
        cache = CacheConfig(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.sink = RingSink(1 << 22)
        log = StepLog(LogHeader.of(config, cache, {}), self.sink)
        scheduler = LoggedScheduler(Scheduler(config, build_cache(cache)), log)
        self.now_s = 0.0
        self.runner: Any = CacheRunner()
        ready = EngineReady(num_blocks, BLOCK_SIZE, 64, VOCAB_SIZE, "float32", "cpu", num_kv_tokens=num_blocks * 4)
        events = EventBus((), lambda: self.now_s)
        self.distrusted: list[bool] = []
        self.audits = Audits(
            share, 0.0, scheduler, ready, events.clock, max_num_tokens=config.max_num_batched_tokens,
            distrust=lambda: self.distrusted.append(True),
        )  # fmt: skip
        stages = make_stages(
            scheduler, self.runner, events, LazyBackend("", None, VOCAB_SIZE), audits=self.audits  # type: ignore[arg-type]
        )  # fmt: skip
        self.core = EngineCore(
            scheduler, self.runner, ready, stages, Observers(events, step_log=log),  # type: ignore[arg-type]
            num_steps_under_way=1 + is_async,
        )  # fmt: skip
        self._num_requests = 0

    def ask(self, prompt: list[int] | None = None, salt: str = "") -> tuple[list[int], int]:
        """The tokens of a request, and how many of its prompt's were found."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, seed=0)
        self.core.add_request(EngineCoreRequest(f"ask-{self._num_requests}", prompt or PROMPT, params, cache_salt=salt))
        outputs = self.finish()
        assert {output.request_id for output in outputs} == {f"ask-{self._num_requests}"}
        return [token_id for output in outputs for token_id in output.new_token_ids], outputs[0].num_cached_tokens

    def finish(self) -> list[Any]:
        outputs = []
        while self.core.has_unfinished_requests():
            outputs += self.core.step().outputs
        return outputs

    def audit(self) -> None:
        self.now_s += 1.0
        self.core.work_when_idle()
        assert not self.finish(), "an audit tells no client anything"

    @property
    def results(self) -> tuple[int, int]:
        stats = self.core.stats()
        return stats.num_agreeing_audits, stats.num_differing_audits

    def verify(self) -> None:
        assert self.core.stats().num_free_blocks == self.core.stats().num_blocks
        self.core.shutdown()
        run = RecordedRun(self.sink.dump())
        assert verify(run).num_steps > 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("salt", ["", "mine"])
def test_a_wrong_block_is_found_and_ends(salt: str, is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(is_async=is_async)
    right, _ = rig.ask(salt=salt)
    assert rig.ask(salt=salt) == (right, NUM_HIT_TOKENS)
    place = next(place for place, token_id in rig.runner.slots.items() if token_id == 9)
    rig.runner.slots[place] += 1
    wrong, num_cached_tokens = rig.ask(salt=salt)
    assert wrong != right
    assert num_cached_tokens == NUM_HIT_TOKENS
    with caplog.at_level(logging.ERROR):
        rig.audit()
    assert rig.results == (0, 1)
    assert rig.distrusted == [True]
    assert len(caplog.records) == 1
    assert rig.ask(salt=salt) == (right, 0)
    assert rig.ask(salt=salt) == (right, NUM_HIT_TOKENS)
    for _ in range(4):
        rig.audit()
    assert rig.results[1] == 1
    assert rig.results[0] > 0
    rig.verify()


def test_a_right_cache_is_never_reported_and_stays() -> None:
    rig = Rig()
    for number in range(12):
        prompt = [*PROMPT, *range(number % 5)]
        answer = rig.ask(prompt)
        rig.audit()
        assert rig.ask(prompt)[0] == answer[0]
        rig.audit()
    assert rig.results[0] >= 12
    assert rig.results[1] == 0
    assert rig.ask()[1] == NUM_HIT_TOKENS
    rig.verify()


def test_one_in_n_requests_is_audited() -> None:
    rig = Rig(share=0.25)
    for _ in range(9):
        rig.ask()
        rig.audit()
    assert rig.results == (2, 0)
    rig.verify()


def test_a_busy_engine_core_audits_nothing() -> None:
    rig = Rig()
    rig.ask()
    rig.ask()
    rig.core.work_when_idle()
    rig.core.step()  # the audit is under way
    assert rig.ask() == rig.ask()
    assert rig.results == (0, 0)
    rig.now_s += 1.0
    rig.audit()
    assert rig.results == (1, 0)
    rig.verify()


def test_audits_take_at_most_a_fiftieth_of_the_time() -> None:
    rig = Rig()
    for _ in range(4):
        rig.ask()
    rig.core.work_when_idle()
    rig.now_s += 2.0
    rig.finish()
    assert rig.results == (1, 0)
    for _ in range(97):  # of the 98 s that are left to others
        rig.audit()
    assert rig.results == (1, 0)
    rig.audit()
    assert rig.results == (2, 0)
    rig.verify()


def test_no_audit_where_memory_is_short() -> None:
    rig = Rig(num_blocks=16)
    rig.ask()
    rig.ask()
    rig.audit()
    assert rig.results == (0, 0)
    rig.verify()


def test_a_long_hit_is_audited_as_far_as_one_step_goes() -> None:
    rig = Rig(max_num_batched_tokens=9)
    rig.ask()
    rig.ask()
    rig.audit()
    assert rig.results == (1, 0)
    rig.verify()


def test_a_prefix_that_is_gone_is_not_audited() -> None:
    rig = Rig()
    rig.ask()
    rig.ask()
    rig.core.reset_prefix_cache()
    rig.audit()
    assert rig.results == (0, 0)
    rig.verify()


def test_a_reset_ends_the_audit_under_way() -> None:
    rig = Rig()
    rig.ask()
    rig.ask()
    rig.core.work_when_idle()
    rig.core.step()
    assert rig.core.reset_prefix_cache()
    rig.finish()
    rig.verify()


def test_requests_between_audits_cost_no_stage() -> None:
    """A stage in use is called in each step; audits are in use for the first step of a request at most."""
    rig = Rig()
    rig.core.add_request(EngineCoreRequest("one", PROMPT, SamplingParams(temperature=0.0, max_tokens=8, seed=0)))
    assert rig.core.stages.active == [rig.audits]
    rig.core.step()
    assert rig.core.stages.active == []
    rig.finish()


class Loop(EngineLoop):
    """A loop to which nothing comes."""

    def _receive(self, wait_ms: int) -> bool:
        return False

    def _send(self, client: bytes, message: object) -> None:
        raise NotImplementedError("there is no client")


def test_the_loop_audits_while_it_is_idle() -> None:
    rig = Rig()
    rig.ask()
    rig.ask()
    loop = Loop(rig.core)
    for _ in range(8):
        loop.run_once()
    assert rig.results == (1, 0)
    rig.verify()


@pytest.mark.parametrize("changes", [{"enable_prefix_caching": False}, {"model": "echo?is_generative=0"}])
def test_audits_without_hits_are_refused(changes: dict[str, Any]) -> None:
    model = ModelRunnerConfig(changes.pop("model", "echo"))
    with pytest.raises(EngineStartError, match="--audit-hits needs prefix caching"):
        build_engine_core(EngineConfig(model, runner="echo", audit_hits=0.5, **changes))


def test_without_equal_bits_there_are_no_audits_unless_asked_for() -> None:
    for share, has_audits in ((None, False), (0.0, False), (0.5, True)):
        core = build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo", audit_hits=share))
        assert isinstance(core.stages.audits, Audits) == has_audits
        core.shutdown()


def test_bits_and_tolerances() -> None:
    one, near = TokenLogprobs((1, 2), (-0.5, -1.0), 1), TokenLogprobs((1, 3), (-0.6, -1.0), 1)
    assert is_close(one, one, 0.0)
    assert not is_close(one, near, 0.0)
    assert is_close(one, near, 0.25)
    assert not is_close(one, TokenLogprobs((1,), (-0.9,), 1), 0.25)
    assert not is_close(one, TokenLogprobs((7,), (-0.5,), 1), 0.25)
