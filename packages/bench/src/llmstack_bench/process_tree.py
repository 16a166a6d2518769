"""Process trees from Linux's `/proc`: members, memory, processor time, end."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of a process tree, in MiB.

    Attributes:
        num_processes: Number of processes that were alive and readable.
        rss: Sum of resident memory; shared pages count once for each process.
        peak_rss: Sum of each process's peak resident memory.
        pss: Sum of proportional shares: the memory that the tree really takes.
    """

    num_processes: int
    rss: float
    peak_rss: float
    pss: float


def tree_pids(pid: int, proc: Path = PROC) -> list[int]:
    """The process and its living descendants, parents first."""
    parent_to_children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit():
            parent = _parent_of(folder)
            if parent is not None:
                parent_to_children.setdefault(parent, []).append(int(folder.name))
    found = [pid] if (proc / str(pid)).is_dir() else []
    for current in found:  # grows while it is walked
        found += sorted(parent_to_children.get(current, []))
    return found


def tree_memory(pid: int, proc: Path = PROC) -> TreeMemory:
    """The present memory of the process and its descendants."""
    rows = [row for row in (_memory_of(proc / str(member)) for member in tree_pids(pid, proc)) if row is not None]
    rss, peak_rss, pss = (sum(row[column] for row in rows) / 1024 for column in range(3))
    return TreeMemory(len(rows), rss, peak_rss, pss)


def tree_cpu_s(pid: int, proc: Path = PROC) -> float:
    """Processor time that the process and its living descendants have taken since they began."""
    ticks = 0
    for member in tree_pids(pid, proc):
        fields = _stat_of(proc / str(member))
        ticks += int(fields[11]) + int(fields[12]) if fields else 0  # in user mode and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def stop_group(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Terminates a process that leads its own group, also a suspended one: SIGTERM, then SIGKILL for the group.

    Returns whether the process ended within `timeout_s` of SIGTERM. No process of the group remains in any case.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        for pid in tree_pids(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # a measurement that was cut short has left it suspended
    try:
        process.wait(timeout_s)
        has_ended = True
    except subprocess.TimeoutExpired:
        has_ended = False
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return has_ended
    process.wait()
    return has_ended


def _parent_of(folder: Path) -> int | None:
    fields = _stat_of(folder)
    return int(fields[1]) if fields else None


def _stat_of(folder: Path) -> list[str]:
    """The fields of `stat` from the state on; none for a process that has ended."""
    try:
        # The name in parentheses may hold spaces and parentheses itself; the state follows the last one.
        return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _memory_of(folder: Path) -> tuple[int, int, int] | None:
    """Resident, most resident and proportional KiB; None for a process that has ended or is another user's."""
    try:
        status = _kibibytes((folder / "status").read_text(encoding="utf-8", errors="replace"))
        shares = _kibibytes((folder / "smaps_rollup").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None
    return status["VmRSS"], status.get("VmHWM", status["VmRSS"]), shares.get("Pss", status["VmRSS"])


def _kibibytes(text: str) -> dict[str, int]:
    """Name to value of the lines that end with kB."""
    split = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in split if len(words) == 3 and words[2] == "kB"}
