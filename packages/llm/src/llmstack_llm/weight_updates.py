"""Change of an engine's weights in place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmstack_types import Control, EngineReady, LLMStackError

if TYPE_CHECKING:
    from llmstack_llm.engine_front_end import EngineFrontEnd
    from llmstack_llm.offline.llm import LLM


class WeightUpdateError(LLMStackError):
    """The weights were not changed: those before are in use. The text is one sentence."""


async def update_engine_weights(engine: EngineFrontEnd, path: str, name: str) -> EngineReady:
    """Lets the engine core take the weights of a folder; no request may be in flight.

    Returns what holds for the engine core from now on, with `name` as the name of its weights.

    Raises:
        WeightUpdateError: Nothing has changed.
        EngineDeadError: The engine core is gone, and so is the change.
    """
    ready = await engine.wait_until_ready()
    engine.ready = _ready_after(ready, await engine.control(Control.UPDATE_WEIGHTS, path), name)
    return engine.ready


def update_weights(llm: LLM, path: str) -> EngineReady:
    """Changes the weights of an `LLM` in place.

    Raises:
        WeightUpdateError: Nothing has changed.
    """
    engine = llm.llm_engine
    engine.ready = _ready_after(
        engine.ready, engine.client.call(Control.UPDATE_WEIGHTS, path), engine.ready.weights_name
    )
    return engine.ready


def _ready_after(ready: EngineReady, result: tuple[str, str, str], name: str) -> EngineReady:
    problem, digest, contract_id = result
    if problem:
        raise WeightUpdateError(problem)
    backends = {**ready.backends, "weights": digest}
    return replace(ready, backends=backends, numeric_contract_id=contract_id, weights_name=name)
