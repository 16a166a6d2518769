"""The engine core's process.

The launcher starts it as `python -m llmstack_engine_core.process FD FD [RUNNER]`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from llmstack_engine_core.heap import share_one_heap
from llmstack_engine_core.plugins import import_lean_torch, load_model_runner
from llmstack_engine_core.progress import SLOWDOWN, STACKS_SIGNAL, SharedProgress
from llmstack_types import EngineStartError, LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_core.engine_core import EngineCore
    from llmstack_engine_core.start_order import StartOrder

logger = logging.getLogger("llmstack_engine_core.process")  # `__name__` is `__main__` here

PR_SET_PDEATHSIG = 1
# How long a process whose parent is gone may take to end by itself.
ORPHAN_GRACE_S = 2.0
# A client connects before or while the model loads; one that has not said hello by then will not.
REFUSAL_WAIT_MS = 5000
MAX_REASON_LENGTH = 500
# Before they are collected. The rows of some steps wait for the thread of the step log, and free themselves after it.
MAX_YOUNG_OBJECTS = 20_000
# Imported in `main`, without garbage collections.
PARTS = (
    "llmstack_engine_core.ipc.sockets", "llmstack_engine_core.start_order", "llmstack_engine_core.engine_core_proc",
    "llmstack_engine_core.build", "llmstack_engine_core.priority", "llmstack_engine_core.step_progress",
)  # fmt: skip

_is_exiting = False
_is_importing = False
_is_exit_due = False


def main(arguments: list[str]) -> int:
    """Serves one engine core; the exit status is 0 when it was asked to end."""
    share_one_heap()
    faulthandler.enable()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_on_signal)
    # In C: the main thread may be inside native code for ever.
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    lifeline, progress = socket.socket(fileno=int(arguments[0])), _map_progress(int(arguments[1]))
    phases_s = _import_parts(arguments[2:])
    from llmstack_engine_core.start_order import receive_start_order

    try:
        order = receive_start_order(lifeline)
    except EngineStartError:  # the launcher has ended in the meantime
        return 1
    if not order.is_spare:
        _remove_places_at_end(order)
    _configure_logging(order.config.log_level, order.config.log_format)
    _end_with_parent_process(order.parent_pid)
    core = None
    if order.is_spare:
        core = _load_in_reserve(lifeline, order, progress, phases_s)
        if core is None:
            return 1
        order = _wait_for_use(lifeline, core)
        _remove_places_at_end(order)
    threading.Thread(target=_follow_parent, args=(lifeline, order), name="lifeline", daemon=True).start()
    return _serve(order, progress, phases_s, core)


def _remove_places_at_end(order: StartOrder) -> None:
    """To be called before anything that may end the process: its parent may be gone already.

    It needs no `finally`, which a signal of its own could leave before it is done.
    """
    from llmstack_engine_core.ipc.sockets import remove_places

    atexit.register(remove_places, order.directory, order.address)


def _import_parts(runners: Sequence[str]) -> dict[str, float]:
    """Imports what an engine core consists of, and model runners; the seconds of each.

    No garbage collection visits it, neither now nor later. A runner that cannot be imported is reported by the start.
    """
    global _is_importing
    gc.disable()
    _is_importing = True
    started_s = time.monotonic()
    for module in PARTS:
        importlib.import_module(module)
    imported_s = time.monotonic()
    for runner in runners:
        with contextlib.suppress(EngineStartError):
            import_lean_torch(runner)
            load_model_runner(runner)
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    gc.enable()
    _is_importing = False
    if _is_exit_due:
        _exit_once()
    return {"import_engine_core": imported_s - started_s, "import_runner": time.monotonic() - imported_s}


def _load_in_reserve(
    lifeline: socket.socket, order: StartOrder, progress: SharedProgress, phases_s: Mapping[str, float]
) -> EngineCore | None:
    """Loads the model with low priority, and tells the parent; None where that failed."""
    from llmstack_engine_core.priority import lower_priority
    from llmstack_engine_core.start_order import LOADED

    lower_priority()
    core, reason = _start(order, progress, phases_s)
    if core is None:
        logger.error("a spare engine core cannot be prepared: %s", reason)
    elif core.ready.device != "cpu":
        core.shutdown()
        logger.error("a spare engine core cannot be prepared: its weights would take the memory of the device twice")
        core = None
    else:
        lifeline.sendall(LOADED)
    return core


def _wait_for_use(lifeline: socket.socket, core: EngineCore) -> StartOrder:
    """Waits for the second order; ends the process where none comes."""
    from llmstack_engine_core.priority import restore_priority
    from llmstack_engine_core.start_order import receive_start_order

    priority = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        order = receive_start_order(lifeline)
    except BaseException as error:  # also a signal
        core.shutdown()
        raise SystemExit(0) from error
    restore_priority(os.getpid(), priority)
    return order


def _map_progress(fd: int) -> SharedProgress:
    try:
        return SharedProgress(fd)
    finally:
        os.close(fd)


def _serve(
    order: StartOrder, progress: SharedProgress, phases_s: Mapping[str, float], core: EngineCore | None = None
) -> int:
    """Serves an engine core, which is built here unless it is given."""
    global _is_exiting
    import zmq

    from llmstack_engine_core.engine_core_proc import EngineCoreProc, refuse_clients
    from llmstack_engine_core.ipc.sockets import bind_engine_socket, make_private_directory

    make_private_directory(order.directory)
    context = zmq.Context()
    heartbeat_timeout_s = 0.0 if order.config.hosts is None else order.config.hosts.heartbeat_timeout_s
    bound = bind_engine_socket(context, order.address, order.config.key_file, heartbeat_timeout_s)
    try:
        reason = ""
        if core is None:
            core, reason = _start(order, progress, phases_s)
        if core is None:
            refuse_clients(bound, reason, REFUSAL_WAIT_MS)
            return 1
        try:
            EngineCoreProc(core, bound, progress).run()
        finally:
            _is_exiting = True  # what removes files is not interrupted, here and at the end of the interpreter
            core.shutdown()
    except LLMStackError as error:  # a lost rank, for one: a state of the machines, and no bug
        logger.error("the engine core ends: %s", _first_line(error))
        logger.debug("where it happened", exc_info=True)
        return 1
    except Exception:  # the last place that can say so; the traceback is for the log alone
        logger.exception("the engine core failed")
        return 1
    finally:
        _is_exiting = True
        bound.close()
        context.term()
    return 0


def _start(order: StartOrder, progress: SharedProgress, phases_s: Mapping[str, float]) -> tuple[EngineCore | None, str]:
    """An engine core, or one line on why there is none."""
    from llmstack_engine_core.build import build_engine_core
    from llmstack_engine_core.step_progress import ProgressHook

    hook = ProgressHook(progress, order.config.start_timeout_s / SLOWDOWN)
    runner_s = _import_parts([order.config.runner])["import_runner"]
    try:
        phases_s = {**phases_s, "import_runner": phases_s["import_runner"] + runner_s}
        core = build_engine_core(order.config, [hook], phases_s)
        hook.listen_to(core.runner)
        return core, ""
    except (LLMStackError, ValueError) as error:  # meant for the user
        logger.debug("the engine core cannot start", exc_info=True)
        return None, _first_line(error)
    except Exception as error:  # a bug, or a device that fails: the text is not meant for the user
        logger.error("the engine core cannot start: %s: %s", type(error).__name__, _first_line(error))
        logger.debug("where it happened", exc_info=True)
        return None, f"an unexpected {type(error).__name__}; the engine core's log says more"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:MAX_REASON_LENGTH] if lines else type(error).__name__


def _configure_logging(level: str, log_format: str) -> None:
    from llmstack_types.log_lines import LogFormatter

    handler = logging.StreamHandler(sys.stderr)
    has_color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(LogFormatter(log_format, f"engine-core {os.getpid()}", has_color=has_color))
    logging.basicConfig(level=level, handlers=[handler])
    if level == "INFO":
        logging.getLogger("torch").setLevel(logging.WARNING)  # its INFO is for those who debug it


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    _exit_once()


def _exit_once() -> None:
    """Ends the main thread, after an import: the interpreter would ignore the exception in callbacks of the import.

    What is on its way out already is not interrupted again.
    """
    global _is_exiting, _is_exit_due
    if _is_importing:
        _is_exit_due = True
    elif not _is_exiting:
        _is_exiting = True
        raise SystemExit(0)


def _end_with_parent_process(parent_pid: int) -> None:
    """Ends this process when its parent is gone, by the kernel's signal.

    The lifeline is a second way, since either can fail: the lifeline stays open where the parent has forked, and the
    signal comes too when only the thread that started this process has ended (hence the check).
    """

    def on_parent_signal(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            _exit_once()

    signal.signal(signal.SIGUSR1, on_parent_signal)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def _follow_parent(lifeline: socket.socket, order: StartOrder) -> None:
    from llmstack_engine_core.ipc.sockets import remove_places

    with contextlib.suppress(OSError):
        while lifeline.recv(1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    remove_places(order.directory, order.address)
    os._exit(1)  # the main thread is inside native code and handles no signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
