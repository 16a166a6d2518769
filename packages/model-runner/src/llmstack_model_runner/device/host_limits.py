"""Limits of this process on processors and memory, control groups included."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""Control groups of version 1 report a huge number where there is no limit."""

_MAX_ONE_THREAD_BYTES = 32 << 20
"""Weights up to this size stay in the processor's caches, where a second thread saves almost nothing: the demo model of
10 MB takes 2.9 instead of 3.0 ms per step. On a busy machine it costs much more. Each of a step's hundred operations
then waits for a thread that is not scheduled (118 instead of 11 ms)."""


_MAX_CACHED_BYTES = 64 << 20
"""Twice the last-level cache that a core of many server processors reaches: of more weights, little is left there."""


def num_usable_cpus(root: Path = Path("/")) -> int:
    """Number of processors that the process may use at once, by affinity and CPU quota; at least 1.

    Args:
        root: Where `proc` and `sys` are found.
    """
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([num_cpus, *(math.ceil(quota) for quota in quotas)]))


def num_compute_threads(
    num_weight_bytes: int, max_threads: int, root: Path = Path("/"), *, num_processes: int = 1
) -> int:
    """Number of threads for a model of this size: one for a small model, else all usable ones up to `max_threads`.

    `num_processes`: Processes that compute at the same time; each uses its share of the processors.
    """
    if num_weight_bytes <= _MAX_ONE_THREAD_BYTES:
        return 1
    return min(max_threads, max(1, num_usable_cpus(root) // num_processes))


def exceed_caches(num_weight_bytes: int) -> bool:
    """Whether each step reads weights of this size from memory."""
    return num_weight_bytes > _MAX_CACHED_BYTES


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the process can still allocate without swapping or being killed; None if the system reports none.

    Args:
        root: Where `proc` and `sys` are found.
    """
    bounds = [room for folder in _cgroup_folders(root, "memory") if (room := _memory_room(folder)) is not None]
    lines = _read(root / "proc/meminfo").splitlines()
    bounds.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(bounds)) if bounds else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the process could have at most, on an idle machine; None where the limit is unknown.

    Args:
        root: Where `proc` and `sys` are found.
    """
    limits = [limit for folder in _cgroup_folders(root, "memory") if (limit := _memory_limit(folder)) is not None]
    lines = _read(root / "proc/meminfo").splitlines()
    limits.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    return min(limits) if limits else None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name).strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control groups and of their ancestors, each of which may set a limit.

    In a container the path in `proc` may not exist below the mount. The top of the mount is then the container's group.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        folder = top / path.lstrip("/")
        yield from (ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(top))


def _cpu_quota(folder: Path) -> float | None:
    quota, period = "", ""
    if text := _read(folder / "cpu.max"):
        quota, _, period = text.strip().partition(" ")
    elif text := _read(folder / "cpu.cfs_quota_us"):
        quota, period = text.strip(), _read(folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max" and -1 mean unlimited.
        return None
    return int(quota) / int(period)


def _memory_room(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            return int(limit) - int(usage) + _stat(folder / "memory.stat", cache_name)
    return None


def _stat(path: Path, name: str) -> int:
    """A value of `memory.stat`. Inactive file pages count as free, since the kernel reclaims them under pressure."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
