"""Parts of a model by rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of one model: stages of the layers, and in each stage ranks that share every layer.

    Rank 0 is the engine core's process. It has the last stage, since that one samples: the results are where the
    scheduler is, and the tokens go to the first stage with the message of the step that needs them.

    Attributes:
        tensor_parallel_size: Ranks of a stage.
        pipeline_parallel_size: Stages.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def peers(self) -> range:
        """All ranks but the engine core's."""
        return range(1, self.num_ranks)

    def stage(self, rank: int) -> int:
        """The stage of a rank, counted from the first layers."""
        return self.pipeline_parallel_size - 1 - rank // self.tensor_parallel_size

    def place(self, rank: int) -> int:
        """The place of a rank in its stage."""
        return rank % self.tensor_parallel_size

    def rank(self, stage: int, place: int) -> int:
        """The rank at a place of a stage."""
        return (self.pipeline_parallel_size - 1 - stage) * self.tensor_parallel_size + place

    def is_sampling(self, rank: int) -> bool:
        """Whether a rank has logits, and samples every token itself."""
        return self.stage(rank) == self.pipeline_parallel_size - 1

    def describe(self, rank: int) -> str:
        """A rank's name in messages."""
        return f"rank {rank} of {self.num_ranks}"
