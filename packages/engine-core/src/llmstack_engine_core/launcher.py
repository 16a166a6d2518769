"""Start of an engine core in a process of its own.

A private directory, a socket pair, and no pickle.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.sockets import check_private_directory, make_private_directory, private_address
from llmstack_engine_core.progress import HangWatch, SharedProgress, make_progress_file
from llmstack_engine_core.spare import Spares, StartedProcess
from llmstack_engine_core.start_order import StartOrder, send_start_order
from llmstack_engine_core.supervisor import EngineProcess
from llmstack_types import EngineStartError
from llmstack_types.child_environment import without_secrets


def relaunch_engine_process(config: EngineConfig, ended: EngineProcess, spares: Spares | None = None) -> EngineProcess:
    """Starts another process where one that has ended listened: its clients find it there.

    `spares`: May have one that has loaded the model already.

    Raises:
        EngineStartError: No process can be started, or its directory belongs to another program by now.
    """
    ended.stop()
    try:
        ended.directory.mkdir(mode=0o700)
    except OSError as error:
        raise EngineStartError(f"{ended.directory} cannot be made again: {error.strerror}") from error
    check_private_directory(ended.directory)
    return _launch(config, ended.directory, ended.address, spares)


def launch_engine_process(
    config: EngineConfig, address: str | None = None, spares: Spares | None = None
) -> EngineProcess:
    """Starts the process and returns at once; it then loads the model and answers its clients.

    `address`: Where it listens, checked before (`prepare_address`); None is a socket in a private directory.
    `spares`: May have one that has loaded the model already.

    Raises:
        EngineStartError: No process or no directory could be made.
    """
    directory = make_private_directory()
    return _launch(config, directory, address or private_address(directory), spares)


def make_spares(config: EngineConfig) -> Spares | None:
    """Engine cores in reserve, where the configuration asks for one."""
    return Spares(config, _start_waiting) if config.warm_spare else None


def _launch(config: EngineConfig, directory: Path, address: str, spares: Spares | None) -> EngineProcess:
    spare = None if spares is None else spares.take(directory, address)
    if spare is not None:
        return spare
    try:
        started = _start_waiting()
    except EngineStartError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    send_start_order(started.lifeline, StartOrder(config, directory, os.getpid(), address))
    watch = HangWatch(started.progress, config.hang_timeout_s)
    return EngineProcess(started.popen, started.lifeline, directory, config.shutdown_grace_s, address, watch)


def _start_waiting() -> StartedProcess:
    """Starts a process that waits for its start order.

    Raises:
        EngineStartError: There can be no further process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            progress_fd = make_progress_file()
            try:
                return StartedProcess(_start_process(theirs.fileno(), progress_fd), ours, SharedProgress(progress_fd))
            finally:
                os.close(progress_fd)
    except OSError as error:
        ours.close()
        raise EngineStartError(f"the engine core's process cannot be started: {error.strerror}") from error


def _start_process(lifeline_fd: int, progress_fd: int) -> subprocess.Popen[bytes]:
    # A runner's OpenMP threads would spin for milliseconds after each operation, on cores that its other threads need.
    fds = [lifeline_fd, progress_fd]
    return start_module("llmstack_engine_core.process", fds, {"GOMP_SPINCOUNT": "1000"}, has_secrets=False)


def start_module(
    module: str, fds: Sequence[int], environment: Mapping[str, str] | None = None, *, has_secrets: bool = True
) -> subprocess.Popen[bytes]:
    """Runs `python -m module FD...` in a session of its own: Ctrl-C is for this process, which then ends that one.

    It inherits the descriptors, imports from where this process does, and gets what `environment` adds.
    `has_secrets`: Whether it inherits API keys and tokens.

    Raises:
        OSError: There can be no further process.
    """
    # -P keeps the current directory off the path; what this process imports from is handed over instead.
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    inherited = os.environ if has_secrets else without_secrets(os.environ)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        env={**(environment or {}), **inherited, "PYTHONPATH": python_path},
    )
