"""The part of a model that a rank computes, by its place among the ranks."""

from __future__ import annotations

from llmstack_model_runner.layers.sharding import Collectives, Sharding, StageLinks
from llmstack_parallel.topology import Topology


def rank_part(
    topology: Topology, rank: int, collectives: Collectives | None, links: StageLinks, *, is_expert_parallel: bool
) -> Sharding:
    """The part of this rank, with its connections to ranks of its stage and to other stages."""
    return Sharding(
        rank=topology.place(rank),
        size=topology.tensor_parallel_size,
        collectives=collectives,
        stage=topology.stage(rank),
        num_stages=topology.pipeline_parallel_size,
        links=links,
        is_expert_parallel=is_expert_parallel,
    )
