"""Recovery of failed steps: only rows that fail alone end with an error.

A failed step is tried again with freed memory, then in halves, down to single rows. Earlier rows come first, since
later ones may read the blocks that they fill. A step that is computed again writes the same keys and values into the
same slots, and goes on from the same states, since no row of a step writes a state that one reads. Its only other
effect before sampling is on the partial results of pooling rows, which are restored. Errors after which no step can be
correct are raised and end the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from llmstack_model_runner.device.errors import is_device_failure, is_out_of_memory
from llmstack_model_runner.media.store import MediaWorkError
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows
from llmstack_model_runner.steps.output import PendingStep
from llmstack_model_runner.steps.unwritten_blocks import UnwrittenBlocks
from llmstack_types import ModelRunnerOutput, QuarantinedError

logger = logging.getLogger(__name__)

Compute = Callable[[StepRows], PendingStep]
"""Starts rows of a step. If it raises, no token has been appended."""


@dataclass(frozen=True, slots=True)
class SettledStep:
    """A step that is complete."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class StepRecovery:
    """Computes steps as a whole if possible, otherwise in parts.

    Attributes:
        unwritten: Blocks of failed rows; follows the copies of every step before it is run.
    """

    def __init__(self, make_room: Callable[[], None]) -> None:
        """`make_room` frees memory; it is called once per step, after an allocation has failed."""
        self._make_room = make_room
        self.unwritten = UnwrittenBlocks()

    def run(
        self, batch: InputBatch, step: StepRows, compute: Compute, failures: Mapping[int, str]
    ) -> PendingStep | SettledStep:
        """Computes a step of at least one row; a row that cannot be computed has an error.

        `failures`: Row index to error text, for rows that have failed before the step.

        Raises:
            Exception: As `compute`, where no further step can be right: a failed device, or an inconsistent step.
        """
        if failures:
            outputs = [self._give_up(batch, _take(step, [index]), text) for index, text in failures.items()]
            rest = _take(step, np.setdiff1d(np.arange(len(step.rows)), list(failures)))
            return SettledStep(_merge(step, [*outputs, *self._run_parts(batch, rest, compute)]))
        if (self.unwritten.on_device or self.unwritten.states) and self.unwritten.readers(batch, step):
            return SettledStep(_merge(step, self._run_parts(batch, step, compute)))
        started = self._attempt(batch, step, compute)
        if isinstance(started, PendingStep):
            return started
        return SettledStep(_merge(step, self._run_parts(batch, step, compute, failure=started)))

    def run_whole(
        self, batch: InputBatch, step: StepRows, compute: Compute, failures: Mapping[int, str]
    ) -> PendingStep:
        """Computes all rows, as ranks do that compute a step together: whatever differs between them stays in a row.

        Raises:
            Exception: As `compute`.
        """
        failed = _take(step, list(failures))
        self.unwritten.add(batch, failed)  # rows of this step may share their blocks
        readers = dict.fromkeys(self.unwritten.readers(batch, step), QuarantinedError.NOT_COMPUTABLE)
        self.unwritten.add(batch, failed)
        pending = compute(step)
        pending.failures = {**readers, **failures}
        return pending

    def _run_parts(
        self, batch: InputBatch, step: StepRows, compute: Compute, failure: str | None = None
    ) -> list[ModelRunnerOutput]:
        """Results of all parts, each read before the next part starts, since graphs overwrite their outputs.

        `failure` is the error of the whole step, if it was tried. After the first failed allocation of a step the same
        rows are tried again; before later ones PyTorch releases its cache itself.
        """
        outputs: list[ModelRunnerOutput] = []
        left, has_room_been_made = [step], False
        while left:
            part, *left = left
            readers = self.unwritten.readers(batch, part)
            if readers:
                outputs.append(self._give_up(batch, _take(part, readers), QuarantinedError.NOT_COMPUTABLE))
                part = _take(part, np.setdiff1d(np.arange(len(part.rows)), readers))
            if not len(part.rows):
                continue
            started = failure if failure is not None else self._attempt(batch, part, compute)
            failure = None
            if isinstance(started, PendingStep):
                outputs.append(started.result())
            elif started == QuarantinedError.OUT_OF_MEMORY and not has_room_been_made:
                self._make_room()  # only here, where no traceback refers to the step's tensors any more
                left, has_room_been_made = [part, *left], True
            elif len(part.rows) == 1:
                outputs.append(self._give_up(batch, part, started))
            else:
                left = [*_halves(part), *left]
        return outputs

    def _attempt(self, batch: InputBatch, step: StepRows, compute: Compute) -> PendingStep | str:
        """The started rows, or the error if they could not be computed."""
        partials = batch.pooling.row_to_partial.copy()
        try:
            return compute(step)
        except Exception as error:  # any error of one row, which must not end the other rows
            if isinstance(error, InputBatchError | MediaWorkError) or is_device_failure(error):
                raise
            is_memory = is_out_of_memory(error)
            logger.warning(
                "%d rows of %d tokens could not be computed: %s", len(step.rows), step.num_tokens, _first_line(error),
                exc_info=not is_memory,
            )  # fmt: skip
        batch.pooling.row_to_partial = partials
        return QuarantinedError.OUT_OF_MEMORY if is_memory else QuarantinedError.NOT_COMPUTABLE

    def _give_up(self, batch: InputBatch, step: StepRows, error: str) -> ModelRunnerOutput:
        logger.error("gave up %d rows: %s (%s)", len(step.rows), error, ", ".join(step.request_ids[:8]))
        self.unwritten.add(batch, step)
        # Failed rows get a token too, since the next step may be scheduled for them already.
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        is_sampling = (ends == batch.num_tokens[step.rows]) & ~batch.pooling.is_pooling[step.rows]
        rows = step.rows[is_sampling]
        batch.append_tokens(rows, np.zeros(len(rows), dtype=np.int64))
        errors = dict.fromkeys(step.request_ids, error)
        return ModelRunnerOutput(step.request_ids, [[] for _ in step.rows], errors=errors)


def _take(step: StepRows, indices: IntArray | list[int]) -> StepRows:
    chosen = np.asarray(indices, dtype=np.int64)
    return StepRows(
        request_ids=[step.request_ids[index] for index in chosen.tolist()],
        rows=step.rows[chosen],
        num_computed_tokens=step.num_computed_tokens[chosen],
        num_scheduled_tokens=step.num_scheduled_tokens[chosen],
        num_drafts=step.num_drafts[chosen],
        num_left=step.num_left[chosen],
        num_tokens=int(step.num_scheduled_tokens[chosen].sum()),
        states=None if step.states is None else step.states[chosen],
        places=None if step.places is None else step.places[chosen],
    )


def _halves(step: StepRows) -> list[StepRows]:
    num_rows = len(step.rows)
    return [_take(step, list(range(num_rows // 2))), _take(step, list(range(num_rows // 2, num_rows)))]


def _merge(step: StepRows, outputs: Iterable[ModelRunnerOutput]) -> ModelRunnerOutput:
    """One output with all rows in the step's order."""
    merged = ModelRunnerOutput(step.request_ids, [], {}, {}, {}, {})
    request_id_to_tokens: dict[str, list[int]] = {}
    for output in outputs:
        request_id_to_tokens.update(zip(output.request_ids, output.sampled_token_ids, strict=True))
        for name in ("logprobs", "prompt_logprobs", "errors", "pooled"):
            getattr(merged, name).update(getattr(output, name))
    merged.sampled_token_ids.extend(request_id_to_tokens[request_id] for request_id in step.request_ids)
    return merged


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:500]}"
