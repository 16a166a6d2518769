"""Starts an engine core in a process of its own: a private directory, a socket pair, and no pickle."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.sockets import make_private_directory
from llmstack_engine_core.start_order import StartOrder, send_start_order
from llmstack_engine_core.supervisor import EngineProcess
from llmstack_types import EngineStartError


def launch_engine_process(config: EngineConfig) -> EngineProcess:
    """Starts the process and returns at once; it then loads the model and answers the first client.

    Raises:
        EngineStartError: No process or no directory could be made.
    """
    directory = make_private_directory()
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            popen = _start_process(theirs.fileno())
    except OSError as error:
        ours.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineStartError(f"the engine core's process cannot be started: {error.strerror}") from error
    send_start_order(ours, StartOrder(config, directory, os.getpid()))
    return EngineProcess(popen, ours, directory, config.shutdown_grace_s)


def _start_process(lifeline_fd: int) -> subprocess.Popen[bytes]:
    # -P keeps the current directory off the path; what this process imports from is handed over instead.
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # A runner's OpenMP threads would spin for milliseconds after each operation, on cores that its other threads need.
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ, "PYTHONPATH": python_path}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "llmstack_engine_core.process", str(lifeline_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(lifeline_fd,),
        start_new_session=True,  # Ctrl-C in the terminal is for the front end, which then ends this process
        env=environment,
    )
