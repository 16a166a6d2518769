"""Sources of a cost model's weights.

A file of weights, measured steps, or the log of a live run.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork, fit_cost_model, step_work
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_step_log import RecordedRun, StepLogError
from llmstack_step_log.decisions import SCHEDULED, UPDATED, scheduled_rows, unpack_decision
from llmstack_step_log.encoding import MAGIC
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.replay.against import decisions_as_recorded


def load_cost_model(path: Path) -> LinearCostModel:
    """A cost model from a file: JSON with its weights, JSON with measured `steps`, or what `--record-steps` wrote.

    `steps` is a list of `[prefill tokens, decode rows, context tokens, seconds]`.

    Raises:
        SimulationError: The file cannot be read, or holds none of these; one line.
    """
    try:
        data = path.read_bytes()
        if data.startswith(MAGIC):
            return fit_cost_model(measured_steps(RecordedRun(data)))
        return _from_json(json.loads(data))
    except OSError as error:
        raise SimulationError(f"cost model {path} cannot be read: {error.strerror}") from error
    except (SimulationError, StepLogError) as error:
        raise SimulationError(f"cost model {path}: {error}") from error
    except ValueError as error:
        raise SimulationError(f"cost model {path} is no JSON: {error}") from error


def measured_steps(run: RecordedRun) -> Iterator[tuple[StepWork, float]]:
    """The work of each step of a recorded run, and the seconds from its schedule to its results.

    Raises:
        StepLogError: The run cannot be replayed.
    """
    under_way: deque[tuple[int, list[tuple[Any, ...]]]] = deque()  # results come in the order of the steps
    for decision in decisions_as_recorded(run):
        kind, decided = unpack_decision(decision.packed)
        if kind == SCHEDULED:
            under_way.append((decision.now_us, scheduled_rows(decided)))
        elif kind == UPDATED and under_way:
            began_us, rows = under_way.popleft()
            if rows and decision.now_us > began_us:
                yield step_work(rows), (decision.now_us - began_us) / MICROSECONDS


def _from_json(named: object) -> LinearCostModel:
    known = [field.name for field in fields(LinearCostModel)]
    if not isinstance(named, dict):
        raise SimulationError("must be a JSON object")
    if list(named) == ["steps"]:
        return fit_cost_model(_measured(named["steps"]))
    unknown = next((name for name in named if name not in known), None)
    if unknown is not None:
        raise SimulationError(f"there is no {unknown[:64]!r}; known are {', '.join(known)}, or steps alone")
    return LinearCostModel(**named)


def _measured(steps: object) -> Iterable[tuple[StepWork, float]]:
    if not isinstance(steps, list):
        raise SimulationError("steps must be a list")
    for step in steps:
        if not (isinstance(step, list) and len(step) == 4 and all(type(value) in (int, float) for value in step)):
            raise SimulationError("a step must be [prefill tokens, decode rows, context tokens, seconds]")
        yield StepWork(*step[:3]), step[3]
