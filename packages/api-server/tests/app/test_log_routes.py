"""The level of the log can be set while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

LOGGER = logging.getLogger("llmstack_server.serving.server")


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    names = {name.partition(".")[0] for name in logging.root.manager.loggerDict if name.startswith("llmstack_")}
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


async def test_the_level_is_set_here_in_peers_and_in_engine_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngineClient()
    state = ready_state(engine, HTTPConfig(enable_control_routes=True))
    asked: list[str] = []

    async def ask_peers(question: str) -> list[Any]:
        asked.append(question)
        return [True]

    monkeypatch.setattr(state, "ask_peers", ask_peers)
    app = build_app(state)
    for level, number in (("debug", logging.DEBUG), ("error", logging.ERROR)):
        answer = await call(app, "POST", f"/log_level?level={level}")
        assert (answer.status, answer.json()) == (200, {"status": level})
        assert LOGGER.getEffectiveLevel() == number
    assert asked == ["log_level debug", "log_level error"]
    assert engine.operations == [("set_log_level", "debug"), ("set_log_level", "error")]


@pytest.mark.parametrize("query", ["", "?level=", "?level=loud", "?level=DEBUG"])
async def test_another_level_is_refused_and_changes_nothing(query: str) -> None:
    engine = FakeEngineClient()
    before = LOGGER.getEffectiveLevel()
    answer = await call(
        build_app(ready_state(engine, HTTPConfig(enable_control_routes=True))), "POST", f"/log_level{query}"
    )
    assert (answer.status, answer.json()["error"]["param"]) == (400, "level")
    assert (engine.operations, LOGGER.getEffectiveLevel()) == ([], before)


async def test_it_is_a_control_route() -> None:
    assert (await call(build_app(ready_state(FakeEngineClient())), "POST", "/log_level?level=info")).status == 404


def test_an_engine_core_sets_its_own_level() -> None:
    from llmstack_types.log_lines import set_log_level

    logger = logging.getLogger("llmstack_engine_core.engine_core_proc")
    assert set_log_level("error")
    assert logger.getEffectiveLevel() == logging.ERROR
    assert set_log_level("debug")
    assert logger.getEffectiveLevel() == logging.DEBUG
