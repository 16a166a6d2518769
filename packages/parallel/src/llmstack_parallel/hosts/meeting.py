"""Meeting of the ranks of several nodes, before they exchange data."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import PrefixStore, TCPStore  # what torch.distributed offers without types

from llmstack_engine_client.hosts.network import FirstMachine, Network
from llmstack_engine_core.ipc.addresses import interface_address, tcp_address
from llmstack_kernels.collective import SharedGroup
from llmstack_model_runner.device.start_checks import resolve_device
from llmstack_parallel.collectives.nodes import MAX_PIECES, ChannelLinks, NodesExchange
from llmstack_parallel.collectives.patience import Patience
from llmstack_parallel.collectives.torch_distributed import TorchCollectives, join, make_collectives, set_interface
from llmstack_parallel.exchange import GLOO, NCCL
from llmstack_parallel.messages import MeetMessage
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_parallel.segments import RankSegments, can_share_memory, map_segment
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig, RankPlacement

MEETING_TIMEOUT_S: Final = 120.0


class Meeting:
    """One rank's sockets to other stages, and its group."""

    def __init__(self, network: Network, config: ModelRunnerConfig, rank: int, epoch: int, address: str) -> None:
        """`address`: A free port of this node, where the rank listens for the stage before.

        Raises:
            EngineStartError: It cannot be listened on.
        """
        self._network, self._config, self._rank, self._epoch = network, config, rank, epoch
        self._topology = topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        self._before: zmq.Socket[bytes] | None = None
        self.link = ""
        if topology.stage(rank):
            self._before, self.link = network.listen(zmq.PAIR, address, high_water_mark=MAX_PIECES)

    def join(self, meet: MeetMessage, segments: RankSegments, store: TCPStore | None = None) -> NodesExchange:
        """Connects to the next stage, and waits for the ranks of its own."""
        after = self._network.connect(zmq.PAIR, meet.link, high_water_mark=MAX_PIECES) if meet.link else None
        patience = Patience(START_TIMEOUT_S)
        links = ChannelLinks(self._before, after, self._epoch, patience)
        collectives = self._collectives(meet.store, segments, patience, store)
        return NodesExchange(self._topology, self._rank, collectives, links, patience)

    def _collectives(
        self, address: str, segments: RankSegments, patience: Patience, store: TCPStore | None
    ) -> SharedGroup | TorchCollectives | None:
        topology, place = self._topology, self._topology.place(self._rank)
        size = topology.tensor_parallel_size
        if size == 1:
            return None
        if segments.group >= 0:
            memory = map_segment(segments.group, SharedGroup.num_bytes(size))
            return SharedGroup(memory, place, size, timeout_s=START_TIMEOUT_S)
        timeout = timedelta(seconds=MEETING_TIMEOUT_S)
        if store is None:
            host, _, port = address.rpartition(":")
            store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        own = PrefixStore(f"stage {topology.stage(self._rank)}", store)
        backend = NCCL if resolve_device(self._config.device).type == "cuda" else GLOO
        set_interface(backend, placement_of(self._config).interface)
        join(backend, own, place, size, MEETING_TIMEOUT_S)
        is_deterministic = self._config.enable_deterministic_inference
        return make_collectives(backend, dist.group.WORLD, patience, is_deterministic=is_deterministic)


def placement_of(config: ModelRunnerConfig) -> RankPlacement:
    """The placement of the ranks, which are on several nodes."""
    if config.placement is None:
        raise EngineStartError("the ranks run on one node")
    return config.placement


def first_machine(config: ModelRunnerConfig) -> FirstMachine:
    """The meeting place of nodes: node 0 listens at the given address, or at a free port of the network interface.

    Raises:
        EngineStartError: The interface has no address.
    """
    placement = placement_of(config)
    address = placement.address or tcp_address(interface_address(placement.interface), 0)
    return FirstMachine(address, placement.key_file, placement.silence_s, "node 0")


def is_group_local(config: ModelRunnerConfig) -> bool:
    """Whether the ranks that share every layer are on one node, wherever they are."""
    return config.num_local_ranks % config.tensor_parallel_size == 0


def shares_memory(config: ModelRunnerConfig) -> bool:
    """Whether the ranks that share every layer exchange data over shared memory."""
    is_on_cpu = resolve_device(config.device).type == "cpu"
    return is_on_cpu and config.tensor_parallel_size > 1 and is_group_local(config) and can_share_memory()


def make_store(config: ModelRunnerConfig) -> tuple[TCPStore | None, str]:
    """The meeting place of torch.distributed on the trusted interface, and its address; empty where none is needed.

    Raises:
        EngineStartError: There is no such interface, or none is trusted.
    """
    if config.tensor_parallel_size == 1 or shares_memory(config):
        return None, ""
    interface = placement_of(config).interface
    if not interface:
        raise EngineStartError(
            f"--tensor-parallel-size {config.tensor_parallel_size} over {placement_of(config).num_nodes} nodes needs "
            "--trust-cluster-network INTERFACE: sums between nodes are not encrypted"
        )
    host = interface_address(interface)
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(config.num_ranks)
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=MEETING_TIMEOUT_S)
        fd = listener.detach()  # it is the store's
    store = TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)
    return store, f"{host}:{port}"
