"""Weights that were changed in place, when an engine core dies with them or over them."""

from __future__ import annotations

from typing import Any

import pytest
from engine_client_helpers.scripted import READY, Engine

from llmstack_engine_client import RecoveringClient
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import ClientMessage
from llmstack_types import Control, EngineDeadError


class Updating(Engine):
    """Its weights are the names of folders: those of `deadly` end it, and those of `missing` cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    async def _send(self, message: ClientMessage) -> None:
        if not isinstance(message, ControlCall) or message.operation is not Control.UPDATE_WEIGHTS:
            await super()._send(message)
            return
        (path,) = message.arguments
        self.taken.append(path)
        if path == "deadly":
            self.die()
            return
        result = ("it is gone", "", "") if path == "missing" else ("", f"digest of {path}", f"contract of {path}")
        self.deliver(ControlResult(message.call_id, message.operation, result))


class Cores:
    """A client, and the engine cores that it has started."""

    def __init__(self) -> None:
        self.made: list[Updating] = []
        self.client = RecoveringClient(self._start, max_restarts=3)

    def _start(self) -> Any:
        self.made.append(Updating())
        return self.made[-1]

    @property
    def taken(self) -> list[list[str]]:
        return [one.taken for one in self.made]

    async def update(self, path: str) -> tuple[str, str, str]:
        return await self.client.call(Control.UPDATE_WEIGHTS, path)


@pytest.fixture
async def cores() -> Cores:
    found = Cores()
    await found.client.wait_until_ready()
    return found


async def test_weights_that_end_the_engine_core_are_not_tried_again(cores: Cores) -> None:
    assert await cores.update("good") == ("", "digest of good", "contract of good")
    problem, *rest = await cores.update("deadly")
    assert ("the engine core ended meanwhile" in problem, rest) == (True, ["", ""])
    assert cores.taken == [["good", "deadly"], ["good"]]
    assert (cores.client.num_restarts, cores.client.contract_id) == (1, "contract of good")
    assert await cores.update("better") == ("", "digest of better", "contract of better")
    await cores.client.shutdown()


async def test_other_operations_are_asked_of_the_next_engine_core(cores: Cores) -> None:
    await cores.update("good")
    cores.made[0].die()
    assert await cores.client.call(Control.RESET_PREFIX_CACHE) is True
    assert cores.taken == [["good"], ["good"]]
    await cores.client.shutdown()


async def test_what_is_said_of_the_engine_core_is_of_its_weights(cores: Cores) -> None:
    assert cores.client.engines == [READY]
    assert (await cores.update("missing"))[0] == "it is gone"
    assert cores.client.engines == [READY]
    for path in ("good", "better"):
        await cores.update(path)
        (ready,) = cores.client.engines
        assert ready.numeric_contract_id == cores.client.contract_id == f"contract of {path}"
        assert ready.backends == {**READY.backends, "weights": f"digest of {path}"}
    cores.made[0].die()
    await cores.client.call(Control.STATS)
    assert cores.client.engines == [ready]
    await cores.client.shutdown()


async def test_an_engine_core_without_the_weights_is_none(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    await cores.update("good")
    monkeypatch.setattr("llmstack_engine_client.processes.restarts.MAX_BACKOFF_S", 0.0)
    cores.client._weights._path = "missing"  # deleted since
    cores.made[0].die()
    with pytest.raises(EngineDeadError):
        await cores.client.call(Control.STATS)
    await cores.client.shutdown()
