"""Profiles of a model runner: one at a time, each with an end, and none ends a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig
from llmstack_engine_core.build import build_engine_core
from llmstack_engine_core.config import ProfilerConfig
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.profiles import MAX_NUM_TRACES
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_types import Control, EngineCoreRequest, EngineStartError, ModelRunnerConfig, SamplingParams

RUNNER = f"{__name__}:ProfiledRunner"
failures: list[Exception] = []


class ProfiledRunner(EchoModelRunner):
    """Counts the steps of a profile into its trace."""

    num_steps: int | None = None

    def start_profile(self, **details: bool) -> None:
        assert self.num_steps is None
        assert set(details) == {"with_stack", "with_memory", "record_shapes"}
        self.num_steps = 0

    def execute_model(self, *arguments: Any) -> Any:
        if self.num_steps is not None:
            self.num_steps += 1
        return super().execute_model(*arguments)

    def stop_profile(self, path: str) -> None:
        num_steps, self.num_steps = self.num_steps, None
        if failures:
            raise failures.pop()
        Path(path).write_text(str(num_steps))


def make_core(folder: Path, **options: Any) -> EngineCore:
    options = {"torch_profiler_use_gzip": False, **options}
    profiler = ProfilerConfig(str(folder), **options)
    return build_engine_core(EngineConfig(ModelRunnerConfig("echo?"), runner=RUNNER, profiler=profiler))


def generate(core: EngineCore, num_tokens: int) -> None:
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=num_tokens), arrival_time_s=0.0))
    while core.has_unfinished_requests():
        core.step()


def test_a_profile_has_the_steps_between_its_start_and_its_stop(tmp_path: Path):
    core = make_core(tmp_path / "new" / "folder")
    assert core.call(Control.STOP_PROFILE) == ""
    generate(core, 5)
    assert core.call(Control.START_PROFILE) == ""
    assert "already" in core.call(Control.START_PROFILE)
    generate(core, 4)
    trace = Path(core.call(Control.STOP_PROFILE))
    assert trace.parent == tmp_path / "new" / "folder"
    assert trace.name.endswith(".pt.trace.json")
    assert int(trace.read_text()) in (4, 5)  # the last, empty step removes the row
    assert core.call(Control.STOP_PROFILE) == ""
    core.shutdown()


def test_a_profile_ends_by_itself_after_its_steps(tmp_path: Path):
    core = make_core(tmp_path, max_iterations=3)
    core.call(Control.START_PROFILE)
    generate(core, 8)
    assert Path(core.call(Control.STOP_PROFILE)).read_text() == "3"
    core.shutdown()


def test_the_end_of_an_engine_core_writes_the_profile(tmp_path: Path):
    core = make_core(tmp_path)
    core.call(Control.START_PROFILE)
    core.shutdown()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("no such file")])
def test_a_trace_that_cannot_be_written_ends_no_request(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
):
    core = make_core(tmp_path, max_iterations=2)
    failures.append(error)
    core.call(Control.START_PROFILE)
    generate(core, 5)
    assert core.call(Control.STOP_PROFILE) == ""
    assert str(error) in caplog.text
    assert core.call(Control.START_PROFILE) == ""
    core.shutdown()


def test_a_folder_full_of_traces_gets_no_further_one(tmp_path: Path):
    core = make_core(tmp_path)
    for index in range(MAX_NUM_TRACES):
        (tmp_path / f"{index}.pt.trace.json.gz").touch()
    assert "remove some" in core.call(Control.START_PROFILE)
    core.shutdown()


def test_an_engine_core_that_cannot_record_profiles_does_not_start(tmp_path: Path):
    profiler = ProfilerConfig(str(tmp_path))
    with pytest.raises(EngineStartError, match="this model runner records no profiles"):
        build_engine_core(EngineConfig(ModelRunnerConfig("echo?"), runner="echo", profiler=profiler))
    (tmp_path / "file").touch()
    with pytest.raises(EngineStartError, match="cannot create"):
        make_core(tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiler": "cuda"}, "'cuda' is not supported"),
        ({"torch_profiler_dir": ""}, "folder of this machine"),
        ({"torch_profiler_dir": "gs://bucket"}, "folder of this machine"),
        ({"max_iterations": 0}, "from 1 to 1000"),
        ({"max_iterations": 1001}, "from 1 to 1000"),
    ],
)
def test_a_configuration_without_sense_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ProfilerConfig(**({"torch_profiler_dir": "x"} | options))
