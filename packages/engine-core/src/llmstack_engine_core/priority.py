"""The priority of a process that loads its model in reserve."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

LOWEST_PRIORITY: Final = 19
_CAP_SYS_NICE: Final = 23


def lower_priority() -> None:
    """Lowers the priority of this process, if that can be undone without privileges.

    The calling thread gets the lowest priority, and those that it starts inherit it. Where only an administrator may
    raise it again, the priority of the session is lowered instead; the kernel knows it where it groups by sessions.
    """
    if _may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    else:
        _set_session_priority(os.getpid(), LOWEST_PRIORITY)


def restore_priority(pid: int, priority: int) -> None:
    """Undoes `lower_priority` for all threads of a process; does nothing for one that is gone."""
    for _ in range(2):  # a thread may start another meanwhile
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    if os.getpriority(os.PRIO_PROCESS, int(task)) == LOWEST_PRIORITY:
                        os.setpriority(os.PRIO_PROCESS, int(task), priority)
    _set_session_priority(pid, 0)


def _set_session_priority(pid: int, priority: int) -> None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:
        file.write(str(priority))


def _may_raise_priority() -> bool:
    try:
        import resource

        if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20:
            return True
        lines = Path("/proc/self/status").read_text().splitlines()
    except (ImportError, AttributeError, OSError):
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1)
