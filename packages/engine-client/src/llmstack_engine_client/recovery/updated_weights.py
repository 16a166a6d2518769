"""Weights that an engine core has in place of those it began with."""

from __future__ import annotations

from typing import cast

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_types import Control, EngineStartError, Operation
from llmstack_types.control import ArgumentTs, ResultT


class UpdatedWeights:
    """The folder of the last change that an engine core made; another engine core gets its weights before requests.

    Attributes:
        contract_id: The numeric contract id with them; empty before the first change.
    """

    def __init__(self) -> None:
        self.contract_id = ""
        self._path = ""

    def follow(self, operation: object, arguments: tuple[object, ...], result: object) -> None:
        """Notes an operation that has been done."""
        if operation is Control.UPDATE_WEIGHTS and isinstance(result, tuple) and not result[0]:
            self._path, self.contract_id = str(arguments[0]), str(result[2])

    def lost(self, operation: Operation[ResultT, *ArgumentTs], reason: str) -> ResultT | None:
        """The result of a change in which the engine core has died; None of another operation, which is repeated.

        The change may have been what ended it, so the next engine core has the weights before, and does not try it.
        """
        if operation is not Control.UPDATE_WEIGHTS:
            return None
        return cast("ResultT", (f"the engine core ended meanwhile ({reason}); another one has those before", "", ""))

    async def restored(self, client: AsyncClient) -> str:
        """The numeric contract id of an engine core that has just been started, once it has these weights.

        Raises:
            EngineStartError: It did not come up, or the folder can no longer be read.
            EngineDeadError: It has ended.
        """
        ready = await client.wait_until_ready()
        if not self._path:
            return ready.numeric_contract_id
        problem, _, contract_id = await client.call(Control.UPDATE_WEIGHTS, self._path)
        if problem:
            raise EngineStartError(f"its weights cannot be changed to those of {self._path} again: {problem}")
        self.contract_id = contract_id  # another one if the files have changed
        return contract_id
