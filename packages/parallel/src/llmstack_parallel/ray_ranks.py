"""Ranks of one model as actors of a Ray cluster that the operator runs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmstack_parallel.hosts.meeting import placement_of
from llmstack_parallel.ray_host import RayRank, pack_rank_order
from llmstack_parallel.ray_hosts import PLACEMENT_TIMEOUT_S, bundle, join_cluster
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig


class RayRanks:
    """Places one actor for each rank but the engine core's, those of a stage on one node. Steps do not pass Ray."""

    def __init__(self, config: ModelRunnerConfig, address: str) -> None:
        """Joins the cluster and starts the actors; they join the engine core's rank at `address` by themselves.

        Raises:
            EngineStartError: Ray is not installed, there is no cluster, it asks for no token, or it has no room.
        """
        is_open = placement_of(config).allow_ray_without_token
        self._ray = join_cluster("--distributed-executor-backend", allow_without_token=is_open)
        self._actors: list[Any] = []
        self._group: Any = None
        try:
            self._place(config, address)
        except BaseException:
            self.close()
            raise

    def _place(self, config: ModelRunnerConfig, address: str) -> None:
        ray = self._ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        share, bundles = bundles_for(config, nodes)
        has_whole_stages = len(bundles) <= config.pipeline_parallel_size
        resources = [{name: count * len(ranks) for name, count in share.items()} for ranks in bundles]
        strategy = "SPREAD" if config.pipeline_parallel_size > 1 and has_whole_stages else "PACK"
        self._group = ray.util.placement_group(resources, strategy=strategy)
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            needs = ", ".join(f"{count:g} {name}" for name, count in share.items())
            raise EngineStartError(f"the Ray cluster has no room for {config.num_ranks - 1} ranks with {needs} each")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = ray.remote(RayRank)
        for index, ranks in enumerate(bundles):
            scheduling = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            for rank in ranks:
                placement = replace(placement_of(config), node=rank, address=address)
                actor = actor_class.options(
                    num_cpus=share["CPU"], num_gpus=share.get("GPU", 0), max_restarts=0, scheduling_strategy=scheduling
                ).remote(pack_rank_order(replace(config, placement=placement)))
                self._actors.append(actor)
        try:
            ray.get([actor.pid.remote() for actor in self._actors], timeout=PLACEMENT_TIMEOUT_S)
        except Exception as error:  # Ray has many kinds
            raise EngineStartError(
                f"the actors of the ranks do not start ({type(error).__name__}): each node needs this version of "
                "llmstack, and Ray's logs have the reason"
            ) from error

    def close(self) -> None:
        """Ends the actors and leaves the cluster. Idempotent."""
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(Exception):  # its node is gone
                self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._group = None
        self._ray.shutdown()


def place_on_ray(config: ModelRunnerConfig) -> Callable[[str], Callable[[], None]]:
    """A function that places the ranks when the engine core's rank listens at an address; its result ends them."""

    def place(address: str) -> Callable[[], None]:
        return RayRanks(config, address).close

    return place


def bundles_for(
    config: ModelRunnerConfig, nodes: list[dict[str, float]]
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """The resources of each rank, and the ranks that share a bundle, which is on one node.

    The ranks of a stage share one where a node is large enough; the engine core's rank needs none.
    """
    topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
    num_processes = config.num_ranks * (1 if config.placement is None else config.placement.num_replicas)
    share = bundle(nodes, -(-num_processes // max(1, len(nodes))), 1)
    stages: dict[int, list[int]] = {}
    for rank in topology.peers:
        stages.setdefault(topology.stage(rank), []).append(rank)
    largest = max(len(ranks) for ranks in stages.values())
    if not any(all(node.get(name, 0.0) >= largest * count for name, count in share.items()) for node in nodes):
        return share, [(rank,) for rank in topology.peers]
    return share, [tuple(ranks) for ranks in stages.values()]
