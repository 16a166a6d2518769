"""Weights of an engine core change in place: what it says of itself, and which blocks it finds afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.disk_core import PROMPT, Core

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_step_log import RecordedRun
from llmstack_step_log.records import NumericsChanged
from llmstack_types import Control, EngineCoreRequest, ModelRunnerConfig, SamplingParams
from llmstack_types.errors import WeightsReloadedError


class Updating(Core):
    """Its weights are a number, which is the name of a folder and the numeric contract id."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, contract="0")
        self.runner.update_weights = self._take
        self.core._ready_with = lambda path: replace(self.core.ready, numeric_contract_id=path)

    def _take(self, path: str) -> None:
        if path == "gone":
            raise WeightsReloadedError("the disk is gone")
        if not path.isdigit():
            raise ValueError("a tensor is\nmissing")
        self.runner.weight = int(path)
        self.runner.slots.clear()

    def update(self, path: str) -> tuple[str, str, str]:
        return self.core.call(Control.UPDATE_WEIGHTS, path)


def fresh(folder: Path, weight: int) -> list[int]:
    """The tokens of the prompt by an engine core that has never had other weights."""
    core = Core(folder)
    core.runner.weight = weight
    tokens = core.ask()[0]
    core.close()
    return tokens


@pytest.mark.parametrize("is_written", [True, False], ids=["blocks on disk", "blocks not written yet"])
def test_no_block_of_other_weights_is_found_in_memory_or_on_disk(tmp_path: Path, is_written: bool) -> None:
    expected = {weight: fresh(tmp_path / f"alone{weight}", weight) for weight in (0, 3)}
    core = Updating(tmp_path / "shared")
    assert core.ask() == (expected[0], 0, 0)
    if is_written:
        core.write()
    assert core.update("3") == ("", "", "3")
    assert core.ask() == (expected[3], 0, 0)
    assert core.ask()[:1] == (expected[3],)
    core.write()
    assert core.update("0") == ("", "", "0")
    tokens, num_cached, num_from_disk = core.ask()
    assert tokens == expected[0]
    if is_written:
        assert num_cached >= num_from_disk > 0  # its own
    assert core.update("3") == ("", "", "3")
    assert core.ask()[0] == expected[3]
    core.close()
    changes = [one for one in RecordedRun(core.sink.dump()).events() if isinstance(one, NumericsChanged)]
    assert [one.numerics["numeric_contract"] for one in changes] == ["3", "0", "3"]


def test_requests_sleep_and_bad_weights_are_in_the_way(tmp_path: Path) -> None:
    core = Updating(tmp_path / "cache")
    assert core.update("a") == ("a tensor is missing", "", "")
    assert core.core.ready.numeric_contract_id == "0"
    core.core.add_request(core.request(PROMPT))
    assert core.update("3") == ("requests are running", "", "")
    core.finish()
    core.core.sleep_level = 1
    assert core.update("3") == ("the engine sleeps", "", "")
    core.core.sleep_level = 0
    assert core.update("3")[0] == ""
    core.close()


def test_weights_that_do_not_fit_leave_the_cached_prefixes(tmp_path: Path) -> None:
    core = Updating(tmp_path / "cache")
    tokens = core.ask()[0]
    assert core.update("a") == ("a tensor is missing", "", "")
    again, num_cached, num_from_disk = core.ask()
    assert (again, num_from_disk) == (tokens, 0)
    assert num_cached > 100
    assert core.update("gone") == ("the disk is gone", "", "")  # the weights are as before, but the blocks are lost
    _, num_cached, num_from_disk = core.ask()
    assert num_cached == num_from_disk
    core.close()


def test_adapters_are_read_again_after_weights_that_could_not_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, lost = Updating(tmp_path / "cache"), []
    monkeypatch.setattr(core.core.stages.adapters, "lose_weights", lambda: lost.append("adapters"))
    assert core.update("a")[0] == "a tensor is missing"
    assert lost == []
    assert core.update("gone") == ("the disk is gone", "", "")
    assert lost == ["adapters"]
    assert core.core.ready.numeric_contract_id == "0"
    core.close()


def test_a_runner_that_changes_no_weights_is_named(tmp_path: Path) -> None:
    core = build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo"))
    assert "does not change weights in place" in core.call(Control.UPDATE_WEIGHTS, str(tmp_path))[0]
    core.shutdown()


def test_the_message_has_the_numbers_of_the_new_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[str] = []
    monkeypatch.setattr(EchoModelRunner, "update_weights", lambda runner, path: taken.append(path), raising=False)
    monkeypatch.setattr(
        EchoModelRunner, "backends", lambda runner: {"weights": taken[-1] if taken else "start"}, raising=False
    )
    core: Any = build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo"))
    before = core.ready
    problem, digest, contract_id = core.call(Control.UPDATE_WEIGHTS, "other")
    assert (problem, digest) == ("", "other")
    assert contract_id == core.ready.numeric_contract_id != before.numeric_contract_id
    assert core.ready.backends == {"weights": "other"}
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2, seed=0)))
    while core.has_unfinished_requests():
        core.step()
    core.shutdown()
