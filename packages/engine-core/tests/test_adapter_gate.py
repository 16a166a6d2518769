"""Requests wait for their adapters while others run; an adapter in use stays, and an unloaded one takes no more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_step_log import read_step_log
from llmstack_step_log.replay.verify import verify
from llmstack_types import Control, EngineCoreRequest, LoRAIdentity, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
MAX_STEPS = 20_000


class GatedRunner(EchoModelRunner):
    """Reads an adapter when its gate is open; records what is read."""

    def __init__(self, config: ModelRunnerConfig) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.read: list[str] = []

    def read_adapter(self, identity: str, path: str) -> object:
        self.gate.wait()
        self.read.append(identity)
        return super().read_adapter(identity, path)


class Rig:
    def __init__(self, tmp_path: Path, max_loras: int = 1, max_cpu_loras: int = 2) -> None:
        model = ModelRunnerConfig("echo", enable_lora=True, max_loras=max_loras, **LIMITS)  # type: ignore[arg-type]  # by name
        scheduler = SchedulerConfig(max_loras=max_loras, **LIMITS)  # type: ignore[arg-type]  # by name
        config = EngineConfig(
            model,
            f"{__name__}:GatedRunner",
            scheduler,
            num_blocks=64,
            max_cpu_loras=max_cpu_loras,
            record_steps=str(tmp_path / "log"),
        )
        self.log = tmp_path / "log"
        self.core: EngineCore = build_engine_core(config)
        self.runner: GatedRunner = self.core.runner  # type: ignore[assignment]  # the class above
        self.path = tmp_path / "adapter"
        self.path.mkdir()
        (self.path / "adapter_config.json").write_text("{}")
        self.answers: dict[str, list[int]] = {}
        self.errors: dict[str, str | None] = {}

    def add(self, request_id: str, name: str | None, max_tokens: int = 3, path: Path | None = None) -> None:
        identity = None if name is None else str(LoRAIdentity(name, "d", 1))
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        request = EngineCoreRequest(request_id, [1, 2, 3], params, lora_name=identity, lora_path=str(path or self.path))
        self.core.add_request(request)

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.errors[output.request_id] = output.error

    def finish(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.core.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests are left")

    def load(self, name: str) -> str:
        state = "loading"
        for _ in range(MAX_STEPS):
            state = self.core.call(Control.LOAD_ADAPTER, str(LoRAIdentity(name, "d", 1)), str(self.path))
            if state != "loading":
                return state
            self.step()
        return state


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_others_run_while_an_adapter_is_read(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.add("adapted", "a")
    rig.add("base", None)
    while "base" not in rig.errors:
        rig.step()
    assert "adapted" not in rig.answers
    assert rig.core.stats().num_waiting == 1
    rig.runner.gate.set()
    rig.finish()
    assert rig.answers == {"base": [1, 2, 3], "adapted": [2, 3, 1]}


def test_adapters_come_and_go_by_use_and_none_in_use_goes(rig: Rig) -> None:
    for number, name in enumerate("abcab"):
        rig.add(f"{number}", name)
    rig.finish()
    assert {name: answer for name, answer in rig.answers.items() if answer != [2, 3, 1]} == {}
    assert len(rig.runner.adapters) == 2
    assert set(rig.errors.values()) == {None}
    assert rig.load("b") == "loaded"
    num_read = len(rig.runner.read)
    rig.add("again", "b")
    rig.finish()
    assert len(rig.runner.read) == num_read


def test_an_unloaded_adapter_serves_its_last_requests_and_no_further_ones(rig: Rig) -> None:
    rig.add("last", "a", max_tokens=6)
    while "last" not in rig.answers:
        rig.step()
    identity = str(LoRAIdentity("a", "d", 1))
    assert rig.core.call(Control.UNLOAD_ADAPTER, identity)
    rig.add("late", "a")
    assert rig.runner.adapters == [identity]
    rig.finish()
    assert rig.answers["last"] == [2, 3, 1, 2, 3, 1]
    assert rig.errors["late"] == "The adapter has been unloaded."
    assert rig.runner.adapters == []
    assert not rig.core.call(Control.UNLOAD_ADAPTER, identity)


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(rig: Rig, tmp_path: Path) -> None:
    rig.add("bad", "a", path=tmp_path / "missing")
    rig.add("base", None)
    rig.finish()
    assert rig.errors == {"bad": "missing has no adapter_config.json.", "base": None}
    assert rig.core.call(Control.LOAD_ADAPTER, str(LoRAIdentity("a", "d", 1)), str(tmp_path / "missing")) == (
        "missing has no adapter_config.json."
    )
    assert rig.load("a") == "loaded"


def test_an_aborted_request_leaves_its_adapter_and_steps_replay(rig: Rig) -> None:
    for number, name in enumerate(["a", "b", None, "a"]):
        rig.add(f"{number}", name)
    rig.core.abort_requests(["0"])
    rig.finish()
    assert "0" not in rig.answers
    rig.core.shutdown()
    assert verify(read_step_log(rig.log)).num_steps > 0


def test_a_refused_request_does_not_keep_its_adapter(rig: Rig) -> None:
    assert rig.load("a") == "loaded"
    rig.add("too long", "a", max_tokens=1000)
    rig.finish()
    assert "context length" in str(rig.errors["too long"])
    for name in "bcb":
        rig.add(f"{len(rig.errors)}", name)
        rig.finish()
    assert sorted(identity[0] for identity in rig.runner.adapters) == ["b", "c"]


def test_without_adapters_a_request_that_names_one_is_refused() -> None:
    model = ModelRunnerConfig("echo", **LIMITS)  # type: ignore[arg-type]  # by name
    scheduler = SchedulerConfig(**LIMITS)  # type: ignore[arg-type]  # by name
    core = build_engine_core(
        EngineConfig(model, "llmstack_engine_core.testing:EchoModelRunner", scheduler, num_blocks=8)
    )
    core.add_request(EngineCoreRequest("r", [1], SamplingParams(max_tokens=1, seed=0), lora_name="a@d.1"))
    (output,) = core.step().outputs
    assert output.error == "The model has no adapter of this name."
    assert core.call(Control.LOAD_ADAPTER, "a@d.1", "/x") == "Adapters are not enabled."


def test_an_adapter_that_is_unloaded_before_it_is_read_serves_those_that_wait_for_it(rig: Rig) -> None:
    rig.runner.gate.clear()
    identities = {name: str(LoRAIdentity(name, "d", 1)) for name in "ab"}
    for name in "ab":  # `a` is being read, and `b` comes next
        rig.add(name, name)
    for identity in identities.values():
        assert rig.core.call(Control.UNLOAD_ADAPTER, identity)
    rig.add("late", "b")
    rig.runner.gate.set()
    rig.finish()
    assert {name: rig.answers[name] for name in "ab"} == {"a": [2, 3, 1], "b": [2, 3, 1]}
    assert rig.errors == {"a": None, "b": None, "late": "The adapter has been unloaded."}
    assert rig.runner.adapters == []
    assert not any(rig.core.call(Control.UNLOAD_ADAPTER, identity) for identity in identities.values())
    rig.add("unknown again", "b")  # by a front end that has loaded it again
    rig.finish()
    assert rig.errors["unknown again"] is None
    assert not rig.core.stats().num_waiting


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_unloaded_adapter_without_waiting_requests_is_not_kept(rig: Rig, tmp_path: Path, is_damaged: bool) -> None:
    rig.runner.gate.clear()
    rig.add("r", "a", path=tmp_path / "missing" if is_damaged else None)
    rig.core.call(Control.UNLOAD_ADAPTER, str(LoRAIdentity("a", "d", 1)))
    rig.core.abort_requests(["r"])
    rig.runner.gate.set()
    rig.finish()
    rig.add("plain", None)
    rig.finish()
    assert rig.runner.adapters == []
    rig.add("again", "a")
    rig.finish()
    assert rig.errors["again"] is None
