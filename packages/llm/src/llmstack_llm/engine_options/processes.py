"""Options of the processes of an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.engine_settings import ParallelSettings, ProcessSettings
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import DataParallelBackend, DistributedExecutorBackend, RoutingPolicyName

MAX_LOCAL_PROCESSES: Final = 64
"""On machines with fewer processors; each takes memory of its own, also before it has loaded a model."""


@option_group
class EngineProcessOptions(ParallelSettings, ProcessSettings, OptionGroup):
    """Processes of one model, engine cores beside each other, and after a crash.

    Attributes:
        digests_weight_content: The digest of the weights is that of their content, which other machines can compare.
        can_reload: The engine core can be exchanged for another one while requests run.
    """

    title = "Processes"

    distributed_executor_backend: DistributedExecutorBackend | None = option(
        None,
        help="how ranks are started: 'mp' is a process each on this machine, 'uni' allows only one, 'ray' are actors "
        "of the cluster at RAY_ADDRESS, 'external_launcher' is this command on each of --nnodes machines "
        "(default: external_launcher with --nnodes, else mp)",
    )
    nnodes: int = option(
        1,
        short="-n",
        at_least=1,
        at_most=4096,
        help="machines that share the ranks of one model; this command runs on each",
    )
    node_rank: int = option(
        0,
        short="-r",
        at_least=0,
        metavar="R",
        help="the number of this machine: 0 answers HTTP, the others host ranks and end with it",
    )
    master_addr: str | None = option(
        None, metavar="HOST", help="address of machine 0, where the others of --nnodes join it"
    )
    master_port: int = option(29501, at_least=1, at_most=65_535, metavar="PORT", help="port of --master-addr")
    trust_cluster_network: str | None = option(
        None,
        metavar="INTERFACE",
        help="network interface for sums and KV blocks between machines, which are neither encrypted nor authenticated",
    )
    distributed_timeout_seconds: float = option(
        60.0,
        above=0,
        at_most=86_400,
        metavar="S",
        help="how long a rank waits for another one within a step, before the engine core ends",
    )
    data_parallel_size: int = option(
        1,
        short="-dp",
        at_least=1,
        at_most=1024,
        help="engine cores that share the requests, each in its own process with the whole model",
    )
    routing: RoutingPolicyName = option(
        "exact",
        help="which of several engine cores gets a request: 'exact' the one that has its prefix cached, weighed "
        "against load, 'load' the one with the fewest requests, 'round_robin' one after the other",
    )
    data_parallel_size_local: int | None = option(
        None,
        short="-dpl",
        at_least=0,
        help="how many of the engine cores run on this machine; other machines join with theirs (default: all)",
    )
    data_parallel_start_rank: int = option(
        0, short="-dpr", at_least=0, help="with --headless, the number of the first engine core of this machine"
    )
    data_parallel_address: str | None = option(
        None, short="-dpa", metavar="HOST", help="address of the first machine, where the others join it"
    )
    data_parallel_rpc_port: int = option(
        29550, short="-dpp", at_least=1, at_most=65_535, metavar="PORT", help="port of --data-parallel-address"
    )
    data_parallel_backend: DataParallelBackend = option(
        "mp",
        short="-dpb",
        help="what starts engine cores: 'mp' processes of each machine, 'ray' the cluster at RAY_ADDRESS",
    )
    allow_ray_without_token: bool = option(
        False, help="join a Ray cluster that asks for no token: who reaches it can run programs there"
    )
    cluster_key_file: str | None = option(
        None, metavar="FILE", help="keys that the machines share; `llmstack cluster-key FILE` makes them"
    )
    cluster_timeout: float = option(
        5.0,
        above=0,
        at_most=600,
        metavar="SECONDS",
        help="a machine without a sign of life for so long counts as lost, and its requests go on elsewhere",
    )
    allow_mixed_numerics: bool = option(
        False, help="serve with machines that compute different bits; no request moves between those"
    )
    max_engine_restarts: int = option(
        0,
        command_default=5,
        at_least=0,
        help="how often within a minute a crashed engine core is replaced and its requests resume; 0 stops the server",
    )
    engine_key_file: str | None = option(
        None,
        metavar="FILE",
        help="keys for engine cores that listen on TCP; --headless makes the file, and the servers read it",
    )
    engine_hang_timeout: float = option(
        60.0,
        at_least=0,
        metavar="SECONDS",
        help="an engine core without progress for so long, and for 20 times of what its step should take, counts as "
        "crashed; 0 lets it hang",
    )

    digests_weight_content: bool = False
    can_reload: bool = False

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_nodes(self) -> int:
        """Nodes of the ranks of one model; each rank that Ray places counts as one."""
        if self.distributed_executor_backend == "ray":
            return self.num_ranks
        return self.nnodes if self.launcher == "external_launcher" else 1

    @property
    def launcher(self) -> DistributedExecutorBackend:
        """The launcher of ranks: on several machines this command on each, which vLLM calls `mp` as well."""
        named = self.distributed_executor_backend or "mp"
        return "external_launcher" if self.nnodes > 1 and named == "mp" else named

    @property
    def num_local_engines(self) -> int:
        """Engine cores of this machine; those of Ray count as of others."""
        if self.data_parallel_backend == "ray":
            return 0
        return self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def has_other_hosts(self) -> bool:
        """Whether some engine cores run on other machines."""
        return self.num_local_engines < self.data_parallel_size

    def _number_conflicts(self) -> Iterator[Problem]:
        """More processes than a machine can have."""
        num_engines, num_ranks = self.num_local_engines, max(1, self.num_ranks // self.num_nodes)
        num_processors = os.cpu_count() or 1
        if num_engines * num_ranks > max(MAX_LOCAL_PROCESSES, num_processors):
            yield Problem(
                "{data_parallel_size}: {num_engines} engine cores and their ranks are {num_processes} processes here, "
                "and at most {limit} can be started",
                num_engines=num_engines, num_processes=num_engines * num_ranks,
                limit=max(MAX_LOCAL_PROCESSES, num_processors),
            )  # fmt: skip

    def _host_conflicts(self) -> Iterator[Problem]:
        size, local = f"{{data_parallel_size}} {self.data_parallel_size}", self.num_local_engines
        if self.data_parallel_backend == "ray":
            yield from self._ray_conflicts()
            return
        last = self.data_parallel_start_rank + local
        if last > self.data_parallel_size:
            start = f"{{data_parallel_start_rank}} {self.data_parallel_start_rank} and {{data_parallel_size_local}}"
            yield Problem(f"{start} {local} exceed {size}")
        if not self.has_other_hosts:
            return
        if self.data_parallel_address is None:
            yield Problem(f"{{data_parallel_size_local}} {local} of {size} needs {{data_parallel_address}}")
        if self.cluster_key_file is None:
            yield Problem(
                f"{{data_parallel_size_local}} {local} of {size} needs {{cluster_key_file}}: "
                "messages between machines are encrypted"
            )

    def _node_conflicts(self) -> Iterator[Problem]:
        """Ranks on several machines that cannot be."""
        backend = f"{{distributed_executor_backend}} {self.launcher}"
        nodes = f"{{nnodes}} {self.nnodes}"
        if self.node_rank >= self.nnodes:
            yield Problem(f"{{node_rank}} {self.node_rank} is too large for {nodes}; the first machine has 0")
        if self.nnodes > 1 and self.launcher != "external_launcher":
            yield Problem(f"{nodes} needs {{distributed_executor_backend}} external_launcher, but that is {backend}")
        elif self.nnodes > 1:
            yield from self._launcher_conflicts(nodes)
        elif self.distributed_executor_backend == "ray" and self.num_ranks == 1:
            yield Problem(f"{backend} has no ranks to place; {{data_parallel_backend}} ray places engine cores")
        elif self.distributed_executor_backend == "ray":
            if self.trust_cluster_network is None:
                yield Problem(
                    f"{backend} needs {{trust_cluster_network}}: the interface by which nodes reach each other"
                )
            if self.cluster_key_file is None:
                yield Problem(f"{backend} needs {{cluster_key_file}}: messages between machines are encrypted")

    def _launcher_conflicts(self, nodes: str) -> Iterator[Problem]:
        sizes = f"{{tensor_parallel_size}} {self.tensor_parallel_size} and {{pipeline_parallel_size}} "
        sizes += str(self.pipeline_parallel_size)
        if self.num_ranks % self.nnodes:
            yield Problem(f"{nodes} cannot share the {self.num_ranks} ranks of {sizes} equally")
        elif self.num_ranks // self.nnodes % self.tensor_parallel_size and self.trust_cluster_network is None:
            size = f"{{tensor_parallel_size}} {self.tensor_parallel_size}"
            yield Problem(f"{size} over several of {nodes} needs {{trust_cluster_network}}: sums are not encrypted")
        is_one_port = self.master_port == self.data_parallel_rpc_port
        if self.master_addr is None:
            yield Problem(f"{nodes} needs {{master_addr}}: where the other machines join the first one")
        elif self.has_other_hosts and self.master_addr == self.data_parallel_address and is_one_port:
            yield Problem(f"{{master_port}} and {{data_parallel_rpc_port}} are both {self.master_port}")
        if self.cluster_key_file is None:
            yield Problem(f"{nodes} needs {{cluster_key_file}}: messages between machines are encrypted")
        if self.data_parallel_backend == "ray":
            yield Problem(f"{nodes} and {{data_parallel_backend}} ray exclude each other: Ray starts no other machines")
        elif self.num_local_engines > 1:
            size = f"{{data_parallel_size_local}} {self.num_local_engines}"
            yield Problem(f"{nodes} and {size} exclude each other: each engine core has a first machine of its own")

    def _ray_conflicts(self) -> Iterator[Problem]:
        backend = "{data_parallel_backend} ray"
        if self.data_parallel_size_local is not None or self.data_parallel_start_rank:
            flags = "{data_parallel_size_local} and {data_parallel_start_rank}"
            yield Problem(f"{backend} and {flags} exclude each other: Ray decides where engine cores run")
        if self.data_parallel_address is None:
            yield Problem(f"{backend} needs {{data_parallel_address}}: where its nodes reach this machine")
        if self.cluster_key_file is None:
            yield Problem(f"{backend} needs {{cluster_key_file}}: messages between machines are encrypted")

    def conflicts(self) -> Iterator[Problem]:
        """Adds several ranks in one process, and engine cores of several machines that cannot be."""
        yield from super().conflicts()
        yield from self._number_conflicts()
        yield from self._host_conflicts()
        yield from self._node_conflicts()
        if self.warm_spare and not self.max_engine_restarts:
            yield Problem("{warm_spare} needs {max_engine_restarts} of at least 1: nothing is replaced without")
        if self.warm_spare and self.num_ranks > 1:
            yield Problem("{warm_spare} and {tensor_parallel_size} or {pipeline_parallel_size} exclude each other: the "
                          "ranks of a spare would take the place of those that serve")  # fmt: skip
        if self.distributed_executor_backend == "uni" and self.num_ranks > 1:
            sizes = f"{{tensor_parallel_size}} {self.tensor_parallel_size}, {{pipeline_parallel_size}} "
            yield Problem(
                f"{{distributed_executor_backend}} uni is one process, but {sizes}{self.pipeline_parallel_size} "
                f"need {self.num_ranks}; use mp"
            )
