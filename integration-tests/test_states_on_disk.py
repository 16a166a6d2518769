"""A model with states whose prefixes outlive the engine core: tokens and log-probabilities keep their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_engine import OTHER_FAMILIES, build, requests, run, write_checkpoint

from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify


@pytest.mark.parametrize("family", ["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_FAMILIES)])
def test_the_next_engine_core_goes_on_from_states_on_disk(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path / "model", family)
    answers, stats = [], []
    for number in range(2):
        log = tmp_path / f"{number}.steps"
        core = build(tmp_path / "model", kv_cache_dir=str(tmp_path / "cache"), record_steps=str(log))
        answers.append(run(core, *(one for one in requests() if not one.fork_of)))
        stats.append(core.stats())
        core.shutdown()
        assert verify(read_step_log(log)).num_steps > 10
    assert answers[0] == answers[1]
    first, second = (one.disk for one in stats)
    assert first is not None
    assert second is not None
    assert first.num_tokens == 0
    assert second.num_tokens > 200
    assert not any(second.num_misses[1:])
