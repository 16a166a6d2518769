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
from llmstack_engine_core.start_order import StartOrder, send_start_order
from llmstack_engine_core.supervisor import EngineProcess
from llmstack_types import EngineStartError
from llmstack_types.child_environment import without_secrets


def relaunch_engine_process(config: EngineConfig, ended: EngineProcess) -> EngineProcess:
    """Starts another process where one that has ended listened: its clients find it there.

    Raises:
        EngineStartError: No process can be started, or its directory belongs to another program by now.
    """
    ended.stop()
    try:
        ended.directory.mkdir(mode=0o700)
    except OSError as error:
        raise EngineStartError(f"{ended.directory} cannot be made again: {error.strerror}") from error
    check_private_directory(ended.directory)
    return _launch(config, ended.directory, ended.address)


def launch_engine_process(config: EngineConfig, address: str | None = None) -> EngineProcess:
    """Starts the process and returns at once; it then loads the model and answers its clients.

    `address`: Where it listens, checked before (`prepare_address`); None is a socket in a private directory.

    Raises:
        EngineStartError: No process or no directory could be made.
    """
    directory = make_private_directory()
    return _launch(config, directory, address or private_address(directory))


def _launch(config: EngineConfig, directory: Path, address: str) -> EngineProcess:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            progress_fd = make_progress_file()
            try:
                progress = SharedProgress(progress_fd)
                popen = _start_process(theirs.fileno(), progress_fd)
            finally:
                os.close(progress_fd)
    except OSError as error:
        ours.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineStartError(f"the engine core's process cannot be started: {error.strerror}") from error
    send_start_order(ours, StartOrder(config, directory, os.getpid(), address))
    watch = HangWatch(progress, config.hang_timeout_s)
    return EngineProcess(popen, ours, directory, config.shutdown_grace_s, address, watch)


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
