"""A path that an option would open is refused with the name of that option."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import EngineArgs
from llmstack_server.app import build_app
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.optional_routes import OPTIONS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def paths_of(config: HTTPConfig, **others: Any) -> set[str]:
    state = ready_state(FakeEngineClient(), config)
    state.config = dataclasses.replace(state.config, deployment_secret=b"of all processes", **others)
    return {route.path for route, _ in build_app(state).table.routes}


def test_the_table_has_the_paths_of_every_option(folder: Path) -> None:
    everything = paths_of(
        HTTPConfig(enable_control_routes=True, state_dir=str(folder), has_tokenizer_info=True),
        processes=ProcessConfig(has_sleep_mode=True),
        engine=EngineArgs("fake", profiler_config={"torch_profiler_dir": "traces"}),
        adapters=AdapterNames(root=str(folder)),
        reload=ReloadOptions(reload_models=(f"next={folder}",), weight_update_dir=str(folder)),
    )
    assert {f"/{'/'.join(path.split('/')[1:3])}" if path.startswith("/v1") else path
            for path in everything - paths_of(HTTPConfig())} == set(OPTIONS)  # fmt: skip


@pytest.mark.parametrize(("path", "options"), [*OPTIONS.items(), ("/v1/files/file-1/content", ("--state-dir",))])
async def test_the_options_are_named(path: str, options: tuple[str, ...]) -> None:
    error = (await call(build_app(ready_state(FakeEngineClient())), "POST", path)).json()["error"]
    expected = f"Unknown request URL: POST {path}. The server has this route with {' and '.join(options)}."
    assert (error["message"], error["code"]) == (expected, "unknown_url")


async def test_no_option_is_named_where_it_is_given(folder: Path) -> None:
    state = ready_state(FakeEngineClient(), HTTPConfig(state_dir=str(folder)))
    state.config = dataclasses.replace(state.config, deployment_secret=b"of all processes")
    answer = await call(build_app(state), "GET", "/v1/files/file-1/contents")
    assert answer.json()["error"]["message"] == "Unknown request URL: GET /v1/files/file-1/contents."
