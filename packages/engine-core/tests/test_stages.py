"""A request passes the stages that it needs, in their order; a stage is called in a step only while it is in use."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from llmstack_engine_core.stages import AbsentStage, AuditStage, Execute, Operations, Ready, Stage, Stages
from llmstack_types import (
    Control,
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    KVTransferParams,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
)

STEP = SchedulerOutput(1, [], [], [], 0)
NAMES = ("adapters", "grammars", "transfers", "beams")


class HoldingStage(Stage):
    """Holds the requests that it is to hold, until they are let go; notes what is called of it."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self.name = name
        self.calls = calls
        self.holds = False
        self.error: InvalidRequestError | None = None
        self.waiting: dict[str, EngineCoreRequest] = {}
        self.let_go: set[str] = set()
        self.used_by: set[str] = set()

    @property
    def is_in_use(self) -> bool:
        return bool(self.used_by)

    def hold(self, request: EngineCoreRequest) -> bool:
        self.calls.append((self.name, "hold"))
        if self.error is not None:
            raise self.error
        self.used_by.add(request.request_id)
        if self.holds:
            self.waiting[request.request_id] = request
        return self.holds

    def take_ready(self, wait_s: float) -> list[Ready]:
        self.calls.append((self.name, "take_ready"))
        return [(self.waiting.pop(name), None) for name in [*self.waiting] if name in self.let_go]

    def execute(self, execute: Execute, scheduled: SchedulerOutput, *token_masks: Any) -> Any:
        self.calls.append((self.name, "execute"))
        return execute(scheduled, *token_masks)

    def update(self, step_outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        self.calls.append((self.name, "update"))
        return step_outputs

    def end_step(self, *, is_idle: bool) -> None:
        self.calls.append((self.name, "end_step"))

    def forget(self, request_ids: Collection[str]) -> None:
        self.calls.append((self.name, "forget"))
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            self.used_by.discard(request_id)


class Rig:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.parts = {name: HoldingStage(name, self.calls) for name in NAMES}
        self.stages = Stages(**self.parts, audits=AuditStage())

    def enter(self, request: EngineCoreRequest) -> bool:
        return self.stages.enter(request, self.stages.needed_by(request))

    def step(self) -> list[tuple[str, str]]:
        """The calls of one step."""
        self.calls.clear()
        self.stages.execute(lambda scheduled: self.calls.append(("runner", "execute")), STEP)  # type: ignore[arg-type, return-value]
        self.stages.update(EngineCoreOutputs([]))
        self.stages.end_step(is_idle=True)
        return [*self.calls]


def request(name: str, *needs: str) -> EngineCoreRequest:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="a") if "grammars" in needs else None,
        use_beam_search="beams" in needs,
    )
    return EngineCoreRequest(
        name, [1], params, lora_name="a@d.1" if "adapters" in needs else None,
        kv_transfer=KVTransferParams(True) if "transfers" in needs else None,
    )  # fmt: skip


@pytest.mark.parametrize("needs", [(), ("beams",), ("adapters", "transfers"), NAMES])
def test_a_request_enters_what_it_needs_in_order_and_nothing_else(needs: tuple[str, ...]) -> None:
    rig = Rig()
    assert not rig.enter(request("r", *needs))
    assert rig.calls == [(name, "hold") for name in needs]
    assert [stage.name for stage in rig.stages.active] == list(needs)  # type: ignore[attr-defined]  # those above


def test_a_held_request_goes_on_where_it_was() -> None:
    rig = Rig()
    one = request("r", "adapters", "grammars", "transfers")
    for name in ("adapters", "transfers"):
        rig.parts[name].holds = True
    assert rig.enter(one)
    assert rig.calls == [("adapters", "hold")]
    assert (rig.stages.num_waiting, rig.stages.is_busy, rig.stages.take_ready(0.0)) == (1, True, [])
    rig.parts["adapters"].let_go.add("r")
    assert rig.stages.take_ready(0.0) == [(one, None)]
    rig.calls.clear()
    assert rig.stages.go_on(one)
    assert rig.calls == [("grammars", "hold"), ("transfers", "hold")]
    rig.parts["transfers"].let_go.add("r")
    assert rig.stages.take_ready(0.0) == [(one, None)]
    assert not rig.stages.go_on(one)
    assert not rig.stages._ahead


def test_a_stage_is_in_use_from_the_step_in_which_a_held_request_reaches_it() -> None:
    rig = Rig()
    one = request("r", "adapters", "transfers")
    rig.parts["adapters"].holds = rig.parts["transfers"].holds = True
    rig.enter(one)
    rig.stages.look()
    assert [name for name, _ in rig.step()] == ["adapters", "runner", "adapters", "adapters"]
    rig.parts["adapters"].let_go.add("r")
    rig.stages.take_ready(0.0)
    assert rig.stages.go_on(one)
    assert (rig.stages.is_busy, rig.stages.num_waiting) == (True, 1)
    assert ("transfers", "update") in rig.step()


def test_those_nearest_to_the_scheduler_go_on_first() -> None:
    rig = Rig()
    made = {name: request(name, name) for name in ("adapters", "transfers", "grammars")}
    for name, one in made.items():
        rig.parts[name].holds = True
        rig.parts[name].let_go.add(name)
        rig.enter(one)
    assert [one.request_id for one, _ in rig.stages.take_ready(0.0)] == ["transfers", "grammars", "adapters"]


def test_a_step_calls_the_stages_in_use_alone() -> None:
    rig = Rig()
    rig.enter(request("r", "grammars"))
    rig.enter(request("s", "beams"))
    assert rig.step() == [
        ("beams", "execute"), ("grammars", "execute"), ("runner", "execute"),
        ("grammars", "update"), ("beams", "update"), ("grammars", "end_step"), ("beams", "end_step"),
    ]  # fmt: skip
    rig.stages.forget(["r"])
    assert [name for name, _ in rig.step()] == ["beams", "runner", "beams", "beams"]
    rig.stages.forget(["s"])
    assert rig.stages.active == []
    assert rig.step() == [("runner", "execute")]


@pytest.mark.parametrize("end", [Stages.forget, Stages.abort])
def test_a_held_request_that_ends_leaves_nothing(end: Callable[[Stages, list[str]], object]) -> None:
    rig = Rig()
    rig.parts["adapters"].holds = True
    rig.enter(request("r", *NAMES))
    end(rig.stages, ["r", "unknown"])
    assert (rig.stages.active, rig.stages._ahead, rig.stages.num_waiting) == ([], {}, 0)


def test_a_refused_request_leaves_nothing() -> None:
    rig = Rig()
    rig.parts["transfers"].error = InvalidRequestError("No.")
    with pytest.raises(InvalidRequestError, match="No"):
        rig.enter(request("r", *NAMES))
    rig.stages.forget(["r"])
    assert (rig.stages.active, rig.stages._ahead) == ([], {})


def test_a_stage_names_the_requests_that_the_scheduler_aborts() -> None:
    class Rows(HoldingStage):
        def abort(self, request_ids: list[str]) -> list[str]:
            return [f"{request_id}/row" for request_id in super().abort(request_ids)]

    rig = Rig()
    rows = Rows("beams", rig.calls)
    stages = Stages(**{**rig.parts, "beams": rows}, audits=AuditStage())
    assert stages.abort(["r"]) == ["r"]  # it is not in use
    stages.enter(request("s", "beams"), [rows])
    assert stages.abort(["s"]) == ["s/row"]


def test_a_stage_can_be_in_use_after_an_operation() -> None:
    class Loading(HoldingStage):
        def operations(self) -> Operations:
            return {Control.LOAD_ADAPTER: lambda identity, path: self.used_by.add(identity)}

    rig = Rig()
    stages = Stages(**{**rig.parts, "adapters": Loading("adapters", rig.calls)}, audits=AuditStage())
    stages.operations()[Control.LOAD_ADAPTER]("a@d.1", "folder")
    assert stages.active == []
    stages.look()
    assert stages.active == [stages.adapters]


def test_a_stage_that_is_absent_refuses_and_answers() -> None:
    stage = AbsentStage("There is none.", "model", {Control.UNLOAD_ADAPTER: lambda identity: False})
    with pytest.raises(InvalidRequestError, match="There is none") as caught:
        stage.check(request("r"))
    assert caught.value.param == "model"
    assert stage.operations()[Control.UNLOAD_ADAPTER]("a@d.1") is False
    assert not stage.is_in_use
