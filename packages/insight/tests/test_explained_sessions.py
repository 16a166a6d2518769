"""What became of the session that a request goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, EngineCore, build_engine_core
from llmstack_insight.explain import Explanation, explain
from llmstack_insight.explain.history import FOREIGN
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_kv_cache import session_ledger
from llmstack_kv_cache.computed_tokens import CAUSES, OF_DISK_MISS
from llmstack_step_log import read_step_log
from llmstack_types import Control, EngineCoreRequest, ModelRunnerConfig, SamplingParams
from llmstack_types.stats import COMPUTED_CAUSES, DISK_MISS_CAUSES

TEXT = list(range(10, 50))


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """A cache of 16 blocks of 4 tokens, where prompts are short and followed all the same."""
    monkeypatch.setattr(session_ledger, "MIN_NUM_TOKENS", 0)
    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    model = ModelRunnerConfig("echo", block_size=4, **limits)
    path = str(tmp_path / "steps.log")
    config = EngineConfig(
        model, runner="echo", scheduler=SchedulerConfig(**limits), num_blocks=16, record_steps=path
    )  # fmt: skip
    return build_engine_core(config)


def run(core: EngineCore, name: str, token_ids: list[int], tenant: str = "", **facts: Any) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, token_ids, params, tenant=tenant, **facts))
    while core.has_unfinished_requests():
        core.step()


def both(core: EngineCore, name: str, path: Path, tenant: str | None = None) -> list[Explanation]:
    """From the running engine core, and from its step log."""
    live = core.recent_steps(0)

    def is_shown(other: str) -> bool:
        return live.tenants.get(other) == tenant

    core.shutdown()
    logged = steps_of_log(read_step_log(path), 1000)
    return [explain(log, name, is_shown=None if tenant is None else is_shown) for log in (live, logged)]


def test_how_much_of_a_session_was_found_and_which_request_took_the_rest(core: EngineCore, tmp_path: Path) -> None:
    run(core, "first", TEXT)
    run(core, "taker", list(range(100, 145)))
    run(core, "second", [*TEXT, 1, 2, 3])
    for found in both(core, "second", tmp_path / "steps.log"):
        facts, sentences = found.facts, " ".join(found.sentences)
        assert (facts["goes_on_with"], facts["session_tokens"], facts["found_percent"]) == ("first", 40, 40)
        assert (facts["lost_cause"], facts["dropped_for"]) == ("evicted", "taker")
        assert (
            "40 % of the 40 tokens of that were found. The others were evicted, and were computed again." in sentences
        )
        assert "until blocks were needed for taker." in sentences
    counts = dict(zip(COMPUTED_CAUSES, core.stats().num_computed_tokens_per_cause, strict=True))
    assert (counts["evicted"], counts["new"]) == (24, 40 + 45 + 3)


def test_another_key_is_not_named(core: EngineCore, tmp_path: Path) -> None:
    run(core, "first", TEXT, "a")
    run(core, "taker", list(range(100, 145)), "b")
    run(core, "second", [*TEXT, 1, 2, 3], "a")
    live, _ = both(core, "second", tmp_path / "steps.log", "a")
    assert live.facts["dropped_for"] == FOREIGN
    assert "taker" not in " ".join(live.sentences)


def test_a_released_session_says_so_and_the_log_is_replayed(core: EngineCore, tmp_path: Path) -> None:
    run(core, "first", TEXT, "a", session="s")
    assert core.call(Control.RELEASE_SESSIONS, "b", "s") == (0, 0)
    assert core.call(Control.RELEASE_SESSIONS, "a", "s") == (1, 40)
    run(core, "second", [*TEXT, 1, 2, 3], "a", session="s", is_session_final=True)
    run(core, "third", [*TEXT, 1, 2, 3, 4, 5], "a")
    for name in ("second", "third"):
        assert core.recent_steps(0).notes[name].went_on.cause == "released"
    for found in both(core, "second", tmp_path / "steps.log"):
        assert (found.facts["found_percent"], found.facts["lost_cause"]) == (0, "released")
        assert "The others had been released, and were computed again." in found.sentences


def test_the_causes_of_the_cache_are_those_of_the_statistics() -> None:
    assert CAUSES == COMPUTED_CAUSES
    assert {*OF_DISK_MISS} == {*DISK_MISS_CAUSES} - {"absent"}
    assert {*OF_DISK_MISS.values()} <= {*CAUSES}
