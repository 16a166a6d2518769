"""Actors of a Ray cluster: each has an engine core or a rank, and joins."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from dataclasses import replace
from urllib.parse import urlsplit

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_client.hosts.machine import EnginesEndedError, Machine
from llmstack_engine_client.hosts.messages import Start
from llmstack_engine_client.processes.engines import EngineProcesses
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.ipc.addresses import free_port, own_host, prepare_address, tcp_address
from llmstack_parallel.hosts.agent import NodeAgent
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_types import EngineStartError, LLMStackError, ModelRunnerConfig
from llmstack_types.plain_data import from_plain, to_plain

logger = logging.getLogger(__name__)


class RayHost:
    """One engine core in a process of its own. Ray starts the actor again where it or its node has ended."""

    def __init__(self, order: bytes) -> None:
        """`order`: The configuration and the number of the engine core, as msgpack."""
        threading.Thread(target=_run, args=(order,), name="engine-host", daemon=True).start()

    def pid(self) -> bytes:
        """The id of the actor's process, as text: the actor is there."""
        return str(os.getpid()).encode()


def pack_order(config: EngineConfig, rank: int) -> bytes:
    """The packed order that starts an actor."""
    packed: bytes = msgpack.packb([config.to_plain(), rank])
    return packed


class RayRank:
    """One rank in a process of its own. Its end is the end of all ranks, which are then placed again."""

    def __init__(self, order: bytes) -> None:
        """`order`: The configuration, as msgpack."""
        threading.Thread(target=_run_rank, args=(order,), name="rank", daemon=True).start()

    def pid(self) -> bytes:
        """The id of the actor's process, as text: the actor is there."""
        return str(os.getpid()).encode()


def pack_rank_order(config: ModelRunnerConfig) -> bytes:
    """The order with which the actor of a rank is started; the placement has its number."""
    packed: bytes = msgpack.packb(to_plain(config))
    return packed


def _run_rank(order: bytes) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = from_plain(ModelRunnerConfig, msgpack.unpackb(order))
    try:
        asyncio.run(NodeAgent(config, START_TIMEOUT_S).run())
    except LLMStackError as error:
        logger.error("%s", error)
    except Exception:  # the last place that can say so; the engine core misses its signs of life
        logger.exception("the rank's actor failed")


def _run(order: bytes) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    plain, rank = msgpack.unpackb(order)
    # Its engine core may place ranks in the same cluster.
    os.environ["RAY_ADDRESS"] = importlib.import_module("ray").get_runtime_context().gcs_address
    try:
        asyncio.run(_serve(EngineConfig.from_plain(plain), rank))
    except LLMStackError as error:  # the same would happen in another actor
        logger.error("engine core %d: %s", rank, error)
    except EnginesEndedError:
        logger.error("engine core %d has ended for good", rank)
    except Exception:  # Ray starts another actor
        logger.exception("engine core %d failed", rank)
        os._exit(1)


async def _serve(config: EngineConfig, rank: int) -> None:
    """Returns when the first machine has ended."""
    if config.hosts is None:
        raise ValueError("there is no first machine")
    host = own_host(str(urlsplit(config.hosts.address).hostname))
    config = replace(config, hosts=replace(config.hosts, start_rank=rank, num_local=1))
    address = tcp_address(host, free_port(host))
    prepare_address(address, is_remote=True)

    async def launch(start: Start) -> EngineProcesses:
        if start.generation:
            raise EngineStartError("an engine core on Ray is not exchanged")
        return EngineProcesses("", [address], [launch_engine_process(config, address)], [config])

    await Machine(launch, f"Ray node {host}").run()
