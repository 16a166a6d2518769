"""Actors of a Ray cluster: each has an engine core or a rank, and joins."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from urllib.parse import urlsplit

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_client.hosts.joining import Joining
from llmstack_engine_client.hosts.messages import Join
from llmstack_engine_client.hosts.rendezvous import facts_of, first_machine
from llmstack_engine_client.processes.launcher import launch_engine_process, relaunch_engine_process
from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_client.recovery.restarts import RestartLimits
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.ipc.addresses import free_port, own_host, prepare_address, tcp_address
from llmstack_parallel.hosts.agent import NodeAgent
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_types import LLMStackError, ModelRunnerConfig
from llmstack_types.plain_data import from_plain, to_plain

logger = logging.getLogger(__name__)

LOOK_S = 0.5


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
    except Exception:  # Ray starts another actor
        logger.exception("engine core %d failed", rank)
        os._exit(1)


async def _serve(config: EngineConfig, rank: int) -> None:
    if config.hosts is None:
        raise ValueError("there is no first machine")
    hosts = config.hosts
    host = own_host(str(urlsplit(hosts.address).hostname))
    address = tcp_address(host, free_port(host))
    prepare_address(address, is_remote=True)
    joining = Joining(first_machine(hosts, config.key_file), config.start_timeout_s)
    process = launch_engine_process(config, address)
    watching = asyncio.create_task(_watch(config, process))
    join = Join(f"Ray node {host}", rank, facts_of(hosts), (address,), joining.server_key)
    try:
        await joining.run(join)
    finally:
        watching.cancel()
        for task in await asyncio.gather(watching, return_exceptions=True):
            logger.info("engine core %d ends: %s", rank, task)


async def _watch(config: EngineConfig, process: EngineProcess) -> None:
    """Replaces the engine core where it crashes or hangs, as often as its configuration allows."""
    limits = RestartLimits(config.max_restarts)
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            process.look()
            if process.is_alive:
                continue
            logger.error("the engine core has ended: %s", process.describe_end())
            if not process.has_been_ready or not limits.may_restart(is_search=False):
                return
            process = await asyncio.to_thread(relaunch_engine_process, config, process)
    finally:
        await asyncio.to_thread(process.stop)
