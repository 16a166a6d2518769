"""Facts about the machine: system, processor, memory, limits, GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
GPU_TIMEOUT_S = 5.0
# The features that decide which code runs, of the hundred that a processor lists.
_FEATURES = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "fphp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
_LIMIT_FILES = (
    "cpu.max", "cpuset.cpus.effective", "memory.max", "memory.high", "memory.current", "memory.swap.max", "pids.max",
    "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes",
)  # fmt: skip


def system_facts(root: Path = ROOT) -> dict[str, str]:
    """Operating system, kernel, C library and memory."""
    memory = _table(_read(root / "proc/meminfo"))
    facts = {
        "os": _table(_read(root / "etc/os-release"), "=").get("PRETTY_NAME", platform.platform()).strip('"'),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
    }
    names = {"memory": "MemTotal", "memory available": "MemAvailable", "swap": "SwapTotal"}
    return facts | {name: _gib(memory[key]) for name, key in names.items() if key in memory}


def cpu_facts(root: Path = ROOT) -> dict[str, str]:
    """Model, number and features of the processors."""
    processor = _table(_read(root / "proc/cpuinfo").partition("\n\n")[0])
    features = set(processor.get("flags", processor.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "model": processor.get("model name") or platform.processor() or "unknown",
        "processors": f"{os.cpu_count()}, of which this process may use {usable}",
        "features": " ".join(name for name in _FEATURES if name in features) or "unknown",
    }
    caches = dict(_caches(root / "sys/devices/system/cpu/cpu0/cache"))
    return facts | ({"caches": ", ".join(f"{name} {size}" for name, size in caches.items())} if caches else {})


def limit_facts(root: Path = ROOT) -> dict[str, str]:
    """Limits of the process's control group and its parents; empty without limits."""
    facts: dict[str, str] = {}
    for folder in _control_groups(root):
        for name in _LIMIT_FILES:
            text = " ".join(_read(folder / name).split())
            if text and not _is_unlimited(text):
                facts.setdefault(f"{name} ({folder.relative_to(root)})", text)
    return facts


def gpu_facts() -> dict[str, str]:
    """The GPUs that NVIDIA's driver names."""
    command = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
    except FileNotFoundError:
        return {"nvidia-smi": "not installed"}
    except subprocess.TimeoutExpired:
        return {"nvidia-smi": f"no answer within {GPU_TIMEOUT_S:g} s"}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"nvidia-smi": f"fails: {error}"}
    rows = (line.partition(", ") for line in ran.stdout.splitlines())
    return {f"gpu {index}": facts for index, _, facts in rows} or {"nvidia-smi": "lists no GPU"}


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of the process's groups and of their parents, innermost first."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = mount / controllers.split(",")[0]
        folder = top / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(top))


def _is_unlimited(text: str) -> bool:
    """Whether a value means no limit, in version 1 or 2 of control groups."""
    return text.partition(" ")[0] in ("max", "-1") or (text.isdigit() and int(text) >= 1 << 60)


def _caches(folder: Path) -> Iterator[tuple[str, str]]:
    for index in sorted(folder.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type").strip(), "")
        yield f"L{_read(index / 'level').strip()}{kind}", _read(index / "size").strip()


def _table(text: str, separator: str = ":") -> dict[str, str]:
    rows = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def _gib(text: str) -> str:
    return f"{int(text.split()[0]) / (1 << 20):.1f} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
