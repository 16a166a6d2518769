"""Options of the processes of an engine."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_llm.options.option import OptionGroup, option, option_mixin
from llmstack_llm.options.problem import Problem
from llmstack_types.vocabulary import DistributedExecutorBackend, RoutingPolicyName


@option_mixin
class EngineProcessOptions(OptionGroup):
    """Processes of one model, engine cores beside each other, and after a crash."""

    title = "Processes"

    tensor_parallel_size: int = option(
        1,
        flag="--tensor-parallel-size",
        short="-tp",
        at_least=1,
        at_most=64,
        metavar="N",
        help="ranks that share every layer of the model: on GPUs one each, on a CPU a process each",
    )
    pipeline_parallel_size: int = option(
        1,
        flag="--pipeline-parallel-size",
        short="-pp",
        at_least=1,
        at_most=64,
        metavar="N",
        help="stages that the model's layers are split into, each of --tensor-parallel-size ranks; on CPUs only",
    )
    enable_expert_parallel: bool = option(
        False,
        flag="--enable-expert-parallel",
        short="-ep",
        help="spread whole experts of a mixture over the ranks of --tensor-parallel-size, instead of a part of each",
    )
    distributed_executor_backend: DistributedExecutorBackend | None = option(
        None,
        flag="--distributed-executor-backend",
        help="how ranks are started: 'mp' is a process each on this machine, 'uni' allows only one "
        "(default: mp where there are several)",
    )
    distributed_timeout_seconds: float = option(
        60.0,
        flag="--distributed-timeout-seconds",
        above=0,
        at_most=86_400,
        metavar="S",
        help="how long a rank waits for another one within a step, before the engine core ends",
    )
    data_parallel_size: int = option(
        1,
        flag="--data-parallel-size",
        short="-dp",
        at_least=1,
        metavar="N",
        help="engine cores that share the requests, each in its own process with the whole model",
    )
    routing: RoutingPolicyName = option(
        "exact",
        flag="--routing",
        help="which of several engine cores gets a request: 'exact' the one that has its prefix cached, weighed "
        "against load, 'load' the one with the fewest requests, 'round_robin' one after the other",
    )
    max_engine_restarts: int = option(
        0,
        flag="--max-engine-restarts",
        command_default=5,
        at_least=0,
        metavar="N",
        help="how often within a minute a crashed engine core is replaced and its requests resume; 0 stops the server",
    )
    warm_spare: bool = option(
        False,
        flag="--warm-spare",
        help="keep one more process with the model loaded, on CPUs, which replaces an engine core that ends within a "
        "second; it takes the memory of the weights again",
    )
    engine_key_file: str | None = option(
        None,
        flag="--engine-key-file",
        metavar="FILE",
        help="keys for engine cores that listen on TCP; --headless makes the file, and the servers read it",
    )
    engine_hang_timeout: float = option(
        60.0,
        flag="--engine-hang-timeout",
        at_least=0,
        metavar="SECONDS",
        help="an engine core without progress for so long, and for 20 times of what its step should take, counts as "
        "crashed; 0 lets it hang",
    )

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def conflicts(self) -> Iterator[Problem]:
        """Adds several ranks in one process."""
        yield from super().conflicts()
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
