"""Signal handlers of a process that joins a Ray cluster."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from typing import Final

_REPLACED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV,
    signal.SIGTRAP,
)  # fmt: skip
_ACTION_BYTES: Final = 512  # a `struct sigaction` has fewer


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers of this process where Ray replaces them; in any thread.

    Ray's own handler of SIGTERM aborts the process three seconds later. The end of a server takes as long as its
    requests.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    actions = {number: ctypes.create_string_buffer(_ACTION_BYTES) for number in _REPLACED}
    for number, action in actions.items():
        libc.sigaction(int(number), None, action)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        for number, action in actions.items():
            libc.sigaction(int(number), action, None)
