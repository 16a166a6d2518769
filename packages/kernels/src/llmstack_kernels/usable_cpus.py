"""Processors that this process may use, control groups included."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_usable_cpus(root: Path = Path("/")) -> int:
    """Number of processors that the process may use at once, by affinity and CPU quota; at least 1.

    Args:
        root: Where `proc` and `sys` are found.
    """
    quotas = [quota for folder in control_groups(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([len(own_cpus()), *(math.ceil(quota) for quota in quotas)]))


def own_cpus() -> list[int]:
    """The processors that affinity and CPU sets allow, in ascending order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control groups and of their ancestors, each of which may set a limit.

    In a container the path in `proc` may not exist below the mount. The top of the mount is then the container's group.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        folder = top / path.lstrip("/")
        yield from (ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(top))


def read_text(path: Path) -> str:
    """A file of the system; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _cpu_quota(folder: Path) -> float | None:
    quota, period = "", ""
    if text := read_text(folder / "cpu.max"):
        quota, _, period = text.strip().partition(" ")
    elif text := read_text(folder / "cpu.cfs_quota_us"):
        quota, period = text.strip(), read_text(folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max" and -1 mean unlimited.
        return None
    return int(quota) / int(period)
