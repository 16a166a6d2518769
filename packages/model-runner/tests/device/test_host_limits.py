"""Limits of control groups, in made-up file trees."""

from __future__ import annotations

import os
from pathlib import Path

from llmstack_kernels.usable_cpus import num_usable_cpus
from llmstack_model_runner.device.host_limits import available_memory_bytes, num_compute_threads

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_version_2_limits_count_and_cached_files_are_room(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box/inner\n",
            "proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 8000000 kB\n",
            "sys/fs/cgroup/box/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {10 * MIB}\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
            "sys/fs/cgroup/box/inner/memory.current": "5\n",
            "sys/fs/cgroup/box/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/box/cpu.max": "50000 100000\n",
        },
    )
    assert available_memory_bytes(root) == 50 * MIB
    assert num_usable_cpus(root) == 1


def test_version_1_limits_count(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n",
            "proc/meminfo": "MemAvailable: 8000000 kB\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{70 * MIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{30 * MIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert available_memory_bytes(root) == 41 * MIB


def test_a_container_whose_group_lies_outside_its_view_uses_the_top(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/host/only/path\n",
            "sys/fs/cgroup/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{150 * MIB}\n",
        },
    )
    assert available_memory_bytes(root) == 0


def test_without_any_limit_all_processors_of_the_affinity_are_usable(tmp_path: Path) -> None:
    assert num_usable_cpus(tmp_path) == len(os.sched_getaffinity(0))
    assert available_memory_bytes(tmp_path) is None


def test_a_small_model_computes_on_one_thread_and_a_large_one_on_all(tmp_path: Path) -> None:
    assert num_compute_threads(10 * MIB, max_threads=1000, root=tmp_path) == 1
    assert num_compute_threads(1000 * MIB, max_threads=1000, root=tmp_path) == num_usable_cpus(tmp_path)
    assert num_compute_threads(1000 * MIB, max_threads=1, root=tmp_path) == 1


def test_processes_that_compute_at_the_same_time_share_the_processors(tmp_path: Path) -> None:
    all_cpus = num_usable_cpus(tmp_path)
    shares = [num_compute_threads(1000 * MIB, 1000, tmp_path, num_processes=count) for count in (1, 2, 1000)]
    assert shares == [all_cpus, max(1, all_cpus // 2), 1]
