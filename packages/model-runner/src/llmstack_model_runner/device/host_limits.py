"""Limits of this process on processors and memory, control groups included."""

from __future__ import annotations

from pathlib import Path

from llmstack_kernels.caches import cache_sizes
from llmstack_kernels.usable_cpus import control_groups, num_usable_cpus, read_text

_UNLIMITED = 1 << 60
"""Control groups of version 1 report a huge number where there is no limit."""

_MAX_ONE_THREAD_BYTES = 32 << 20
"""Weights up to this size stay in the processor's caches, where a second thread saves almost nothing: the demo model of
10 MB takes 2.9 instead of 3.0 ms per step. On a busy machine it costs much more. Each of a step's hundred operations
then waits for a thread that is not scheduled (118 instead of 11 ms)."""


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
    """Whether each step reads weights of this size from memory.

    Of weights that are more than twice the last-level cache that a core reaches, little is left there.
    """
    return num_weight_bytes > 2 * cache_sizes().reach


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the process can still allocate without swapping or being killed; None if the system reports none.

    Args:
        root: Where `proc` and `sys` are found.
    """
    bounds = [room for folder in control_groups(root, "memory") if (room := _memory_room(folder)) is not None]
    lines = read_text(root / "proc/meminfo").splitlines()
    bounds.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(bounds)) if bounds else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the process could have at most, on an idle machine; None where the limit is unknown.

    Args:
        root: Where `proc` and `sys` are found.
    """
    limits = [limit for folder in control_groups(root, "memory") if (limit := _memory_limit(folder)) is not None]
    lines = read_text(root / "proc/meminfo").splitlines()
    limits.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    return min(limits) if limits else None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read_text(folder / name).strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


def _memory_room(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = read_text(folder / limit_name).strip(), read_text(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            return int(limit) - int(usage) + _stat(folder / "memory.stat", cache_name)
    return None


def _stat(path: Path, name: str) -> int:
    """A value of `memory.stat`. Inactive file pages count as free, since the kernel reclaims them under pressure."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
