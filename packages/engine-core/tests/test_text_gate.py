"""Requests that sample by the texts of tokens wait until these are read, and no other request does."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_engine_core.text_gate import UNREADABLE
from llmstack_types import EngineCoreRequest, FinishReason, ModelRunnerConfig, SamplingParams


class Core:
    """An engine core whose runner reads its texts when the test lets it.

    Attributes:
        ends: The finish reason and the error of each request that has ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_read = threading.Event()
        self.error: Exception | None = None
        self.rank_error: ValueError | None = None
        self.num_reads = 0
        self.ends: dict[str, tuple[FinishReason | None, str | None]] = {}
        self.of_other_ranks: list[str] = []
        for name, do in (
            ("announce_token_texts", lambda _: self.of_other_ranks.append("announced")),
            ("read_token_texts", lambda _: self._read()),
            ("hold_token_texts", lambda _: self._hold()),
        ):
            monkeypatch.setattr(EchoModelRunner, name, do, raising=False)
        self.core: Any = build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo"))

    def _read(self) -> None:
        self.num_reads += 1
        assert self.may_read.wait(30)
        if self.error is not None:
            raise self.error

    def _hold(self) -> None:
        self.of_other_ranks.append("asked")
        if self.rank_error is not None:
            raise self.rank_error

    def add(self, request_id: str, *, infill: bool = True) -> None:
        params = SamplingParams(temperature=1.0, top_k=4, max_tokens=3, seed=0, infill=infill)
        self.core.add_request(EngineCoreRequest(request_id, [1, 2, 3], params))

    def run_until(self, *request_ids: str) -> None:
        """Steps until these requests have ended."""
        while not self.ends.keys() >= set(request_ids):
            for one in self.core.step().outputs:
                if one.finish_reason is not None:
                    self.ends[one.request_id] = one.finish_reason, one.error


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Core(monkeypatch)
    yield made
    made.may_read.set()
    made.core.shutdown()


def test_other_requests_overtake_one_that_waits(core: Core) -> None:
    core.add("first")
    core.add("second")
    core.add("plain", infill=False)
    core.run_until("plain")
    assert core.ends == {"plain": (FinishReason.LENGTH, None)}
    assert core.core.stages.num_waiting == 2
    core.may_read.set()
    core.run_until("first", "second")
    core.add("later")
    assert core.core.stages.num_waiting == 0
    core.run_until("later")
    assert {reason for reason, _ in core.ends.values()} == {FinishReason.LENGTH}
    assert core.num_reads == 1


def test_texts_that_cannot_be_read_end_the_requests_that_need_them(core: Core) -> None:
    core.error = OSError("it is gone")
    core.may_read.set()
    core.add("first")
    core.add("plain", infill=False)
    core.run_until("first", "plain")
    assert core.ends == {"first": (FinishReason.ERROR, UNREADABLE), "plain": (FinishReason.LENGTH, None)}
    core.error = None
    core.add("second")
    core.run_until("second")
    assert core.ends["second"] == (FinishReason.LENGTH, None)
    assert core.num_reads == 2


def test_texts_that_another_rank_cannot_read_end_the_requests_that_need_them(core: Core) -> None:
    core.rank_error = ValueError("it is gone")
    core.may_read.set()
    core.add("first")
    core.run_until("first")
    assert core.ends == {"first": (FinishReason.ERROR, UNREADABLE)}
    core.rank_error = None
    for name in ("second", "third"):
        core.add(name)
        core.run_until(name)
        assert core.ends[name] == (FinishReason.LENGTH, None)
    assert core.of_other_ranks == ["announced", "asked"] * 2


def test_one_that_is_aborted_waits_no_longer(core: Core) -> None:
    core.add("first")
    core.core.abort_requests(["first"])
    assert not core.core.has_unfinished_requests()
    core.may_read.set()
    core.add("second")
    core.run_until("second")
    assert core.ends.keys() <= {"first", "second"}
    assert core.num_reads == 1
