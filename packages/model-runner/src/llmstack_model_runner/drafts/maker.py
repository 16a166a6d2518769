"""Makers of the drafts of a step, and the blocks of a draft head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, SchedulerOutput


class DraftMaker(ABC):
    """Guesses tokens of the rows of a batch, by a model or a part of one."""

    @property
    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes that it keeps beside each block of the served model."""

    def check(self, spec: KVCacheSpec) -> None:  # noqa: B027 - most makers refuse while they are loaded
        """Raises ValueError, in one sentence, if it cannot guess the tokens of a served model."""

    @abstractmethod
    def cost(self, weight_bytes: int) -> float:
        """The bytes that one draft of every row reads, over those of a served model's step."""

    @abstractmethod
    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates what it keeps of the rows of a batch, whose tables of this group keep the whole context."""

    @abstractmethod
    def release(self) -> None:
        """Frees that; `allocate` may follow."""

    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:  # noqa: B027 - most keep nothing from before
        """Comes before each step, whose rows the batch has."""

    @abstractmethod
    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The drafts of each of the rows, which are distinct, -1 where there is none: [num_rows, most wanted].

        They are in the batch too, behind the known tokens of their rows.
        """

    def forget_blocks(self, block_ids: list[int]) -> None:  # noqa: B027 - nothing of it, which costs accepted drafts
        """Blocks were written from elsewhere."""

    def run_largest(self) -> None:  # noqa: B027 - those of the served model take more
        """Computes the step that needs the most memory."""


class OwnBlocks:
    """Keys and values of a draft head under the served model's block ids: their sizes, and their storage.

    Attributes:
        bytes_per_block: Bytes of the head's keys and values of one block.
    """

    def __init__(self, layers: Iterable[LayerKVSpec], spec: KVCacheSpec) -> None:
        """`layers` are the head's, `spec` is the served model's."""
        dtype = spec.kv_cache_dtype or spec.dtype
        tensors = [layer.block_tensors(spec.block_size, dtype) for layer in layers]
        self.bytes_per_block = sum(tensor.num_bytes for layer in tensors for tensor in layer)
        self._layers = [[(tensor.shape, getattr(torch, tensor.dtype)) for tensor in layer] for layer in tensors]

    def allocate(self, num_blocks: int, device: torch.device) -> KVCaches:
        """Zeroed keys and values of so many blocks, by layer."""
        return list(allocate_block_storage(self._layers, num_blocks, device))
