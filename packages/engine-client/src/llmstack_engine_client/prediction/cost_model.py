"""Cost models: the duration of a step without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, Protocol

from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_types.least_squares import fit_non_negative


class StepWork(NamedTuple):
    """The work of a step: its prompt tokens, its decodes, and the context that they read.

    Attributes:
        num_prefill_tokens: Tokens of prompts.
        num_decode_rows: Tokens whose successors are sampled one by one: decodes, and drafts that they verify.
        num_context_tokens: Tokens whose KV some row reads, its own included, summed over the rows.
    """

    num_prefill_tokens: int
    num_decode_rows: int
    num_context_tokens: int


def step_work(rows: Iterable[Sequence[Any]]) -> StepWork:
    """The work of the rows of a step: `ScheduledRequest`s, or their rows in a log."""
    num_prefill_tokens = num_decode_rows = num_context_tokens = 0
    for row in rows:
        num_scheduled = row[2]  # a named tuple; by index it is faster
        num_context_tokens += row[1] + num_scheduled
        if num_scheduled == 1 or row[4]:
            num_decode_rows += num_scheduled  # for each draft it decodes, too
        else:
            num_prefill_tokens += num_scheduled
    return StepWork(num_prefill_tokens, num_decode_rows, num_context_tokens)


class CostModel(Protocol):
    """Says how long a step takes."""

    def step_s(self, work: StepWork) -> float:
        """Seconds; more than 0 for a step with rows."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A step's seconds as a weighted sum.

    The defaults are a calculation, not a measurement: a model of 8 billion parameters in bfloat16 on a GPU of 3.35 TB/s
    and 990 TFLOP/s. Reading 16 GB of weights takes 4.8 ms; a prefill token needs 16 GFLOP, 40 us at 40 % of the peak;
    a decode row adds 10 us of work that is not shared; KV of 128 KiB per token takes 39 ns to read.

    Attributes:
        base_s: The time of any step.
        prefill_token_s: Per token of a prefill.
        decode_row_s: Per row of one token.
        context_token_s: Per token of context that is read.
    """

    base_s: float = 4.8e-3
    prefill_token_s: float = 40e-6
    decode_row_s: float = 10e-6
    context_token_s: float = 39e-9

    def __post_init__(self) -> None:
        weights = (self.base_s, self.prefill_token_s, self.decode_row_s, self.context_token_s)
        for name, weight in zip(self.__slots__, weights, strict=True):  # each request scales a model: no `asdict`
            if type(weight) not in (int, float) or weight < 0 or not isfinite(weight):
                raise SimulationError(f"{name} must be a number of 0 or more")
        if not any(weights):
            raise SimulationError("a step must take some time")

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return (
            self.base_s
            + self.prefill_token_s * work.num_prefill_tokens
            + self.decode_row_s * work.num_decode_rows
            + self.context_token_s * work.num_context_tokens
        )


def fit_cost_model(measured: Iterable[tuple[StepWork, float]]) -> LinearCostModel:
    """The linear model nearest to measured steps: least squares over the relative error, no weight below 0.

    Relative, since a decode step of 5 ms counts as much as a prefill of 500 ms. O(steps).

    Raises:
        SimulationError: There is nothing to fit, or a measurement is not positive.
    """
    rows = []
    for work, seconds in measured:
        if not (isfinite(seconds) and seconds > 0):
            raise SimulationError("a measured step must take more than 0 seconds")
        rows.append([1.0 / seconds, *(count / seconds for count in work)])
    if not rows:
        raise SimulationError("there are no measured steps")
    size = len(rows[0])
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    return LinearCostModel(*fit_non_negative(gram, [sum(row[i] for row in rows) for i in range(size)]))
