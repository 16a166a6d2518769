"""The calls of a simulation once more, without a model."""

from __future__ import annotations

from core_scheduler_helpers.simulation import Simulation
from llmstack_core_scheduler.testing import DecisionHash
from llmstack_types import InvalidRequestError


def check_replay(original: Simulation, replayed: Simulation) -> None:
    """Runs `original`, and gives a scheduler of `replayed`, which is the same and has not run, the calls of its log.

    Raises:
        AssertionError: The scheduler decides otherwise.
    """
    original.run()
    scheduler, decisions = replayed.make_scheduler(), DecisionHash()
    for name, arguments in original.log:
        if name == "crash":
            scheduler = replayed.make_scheduler()
            continue
        try:
            result = getattr(scheduler, name)(*arguments)
        except InvalidRequestError:
            continue
        if name == "schedule":
            decisions.add(result)
    assert decisions.hexdigest() == original.decisions.hexdigest()
