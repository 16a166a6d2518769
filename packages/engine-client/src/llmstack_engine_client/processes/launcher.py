"""Start of an engine core in a process of its own.

A private directory, a socket pair, and no pickle.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmstack_engine_client.processes.spare import Spares
from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_client.processes.waiting_process import start_waiting_process
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.sockets import name_private_directory, private_address
from llmstack_engine_core.plugins import read_ahead
from llmstack_engine_core.progress import HangWatch
from llmstack_engine_core.start_order import StartOrder, send_start_order


def relaunch_engine_process(config: EngineConfig, ended: EngineProcess, spares: Spares | None = None) -> EngineProcess:
    """Starts a process at the address of one that has ended: its clients find it there.

    `spares`: May have one that has loaded the model already.

    Raises:
        EngineStartError: No process can be started.
    """
    ended.stop()
    return _launch(config, ended.directory, ended.address, spares)


def launch_engine_process(
    config: EngineConfig, address: str | None = None, spares: Spares | None = None
) -> EngineProcess:
    """Starts the process and returns at once; it then loads the model and answers its clients.

    `address`: Where it listens, checked before (`prepare_address`); None is a socket in a private directory.
    `spares`: May have one that has loaded the model already.

    Raises:
        EngineStartError: No process can be started, or there is no place for its directory.
    """
    directory = name_private_directory()
    return _launch(config, directory, address or private_address(directory), spares)


def make_spares(config: EngineConfig) -> Spares | None:
    """Engine cores in reserve, where the configuration asks for one."""
    return Spares(config, start_waiting_process) if config.warm_spare else None


def _launch(config: EngineConfig, directory: Path, address: str, spares: Spares | None) -> EngineProcess:
    """The process makes the directory itself: with this one killed before its order is sent, none is left behind."""
    spare = None if spares is None else spares.take(directory, address)
    if spare is not None:
        return spare
    started = start_waiting_process()
    read_ahead(config.runner, config.model)
    send_start_order(started.lifeline, StartOrder(config, directory, os.getpid(), address))
    watch = HangWatch(started.progress, config.hang_timeout_s)
    return EngineProcess(started.popen, started.lifeline, directory, config.shutdown_grace_s, address, watch)
