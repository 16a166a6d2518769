"""The machines that torchrun has started a command on, as options of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from llmstack_llm.options.problem import Problem
from llmstack_llm.options.resolve import Settings

SOURCE: Final = "torchrun"
_NUMBERS: Final = ("GROUP_WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


def with_torchrun(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings of one of torchrun's processes; they are as before where there are none, or `--nnodes` is given.

    The first process of a machine starts all ranks there, so the others have nothing to do.
    """
    is_one = "TORCHELASTIC_RUN_ID" in environment and all(environment.get(one, "").isdecimal() for one in _NUMBERS)
    if not is_one or settings["distributed_executor_backend"] != "external_launcher" or settings.is_given("nnodes"):
        return settings
    num_machines, machine, num_processes, _ = (int(environment[name]) for name in _NUMBERS)
    found = {"nnodes": num_machines, "node_rank": machine}
    if num_machines > 1 and not settings.is_given("master_addr"):
        settings = settings.replaced(SOURCE, master_addr=environment.get("MASTER_ADDR"))
    settings = settings.replaced(SOURCE, **found)
    num_ranks = settings["tensor_parallel_size"] * settings["pipeline_parallel_size"]
    if num_processes not in (1, num_ranks / num_machines):
        sizes = "{tensor_parallel_size} {tp} and {pipeline_parallel_size} {pp} are {num_ranks} ranks"
        started = "torchrun has started {num_processes} processes on each of {num_machines} machines"
        problem = Problem(
            f"{started}, but {sizes}: give --nproc-per-node 1, or the ranks of a machine",
            tp=settings["tensor_parallel_size"], pp=settings["pipeline_parallel_size"], num_ranks=num_ranks,
            num_processes=num_processes, num_machines=num_machines,
        )  # fmt: skip
        settings.add_problems([problem])
    if num_processes > 1 and environment.get("OMP_NUM_THREADS") == "1" and (os.cpu_count() or 1) > num_processes:
        settings.warnings.append("each rank has one thread: OMP_NUM_THREADS is 1, as torchrun sets it by default")
    return settings


def has_nothing_to_do(settings: Settings, environment: Mapping[str, str]) -> bool:
    """Whether another process of torchrun on this machine starts all ranks."""
    return settings.source("nnodes") == SOURCE and environment["LOCAL_RANK"] != "0"
