"""What makes the drafts of a step: a protocol."""

from __future__ import annotations

from typing import Protocol

import torch

from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, SchedulerOutput


class DraftMaker(Protocol):
    """Guesses tokens of the rows of a batch, by a model or a part of one."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes that it keeps beside each block of the served model."""
        ...

    def check(self, spec: KVCacheSpec) -> None:
        """Raises ValueError, in one sentence, if it cannot guess the tokens of a served model."""
        ...

    def cost(self, weight_bytes: int) -> float:
        """The bytes that one draft of every row reads, over those of a served model's step."""
        ...

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates what it keeps of the rows of a batch, whose tables of this group keep the whole context."""
        ...

    def release(self) -> None:
        """Frees that; `allocate` may follow."""
        ...

    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:
        """Comes before each step, whose rows the batch has."""
        ...

    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The drafts of each of the rows, which are distinct, -1 where there is none: [num_rows, most wanted].

        They are in the batch too, behind the known tokens of their rows.
        """
        ...

    def forget_blocks(self, block_ids: list[int]) -> None:
        """Blocks were written from elsewhere."""
        ...

    def run_largest(self) -> None:
        """Computes the step that needs the most memory."""
        ...
