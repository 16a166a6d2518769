"""Facts read off the files of a machine that is a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmstack_command.collect_env.machine import cpu_facts, gpu_facts, limit_facts, system_facts


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_system_and_its_memory_are_named(tmp_path: Path):
    write(
        tmp_path,
        {
            "etc/os-release": 'NAME="X"\nPRETTY_NAME="Some Linux 12"\n',
            "proc/meminfo": "MemTotal:       8388608 kB\nMemAvailable:   1048576 kB\nSwapTotal: 0 kB\n",
        },
    )
    facts = system_facts(tmp_path)
    assert facts["os"] == "Some Linux 12"
    assert (facts["memory"], facts["memory available"], facts["swap"]) == ("8.0 GiB", "1.0 GiB", "0.0 GiB")


def test_the_processor_is_named_with_the_features_that_matter(tmp_path: Path):
    cpuinfo = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 rdtscp fma amx_tile\n\nprocessor\t: 1\n"
    write(tmp_path, {"proc/cpuinfo": cpuinfo, "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n"})
    write(tmp_path / "sys/devices/system/cpu/cpu0/cache/index0", {"type": "Data\n", "size": "32K\n"})
    facts = cpu_facts(tmp_path)
    assert (facts["model"], facts["features"], facts["caches"]) == ("Some CPU", "avx2 fma amx_tile", "L1d 32K")


@pytest.mark.parametrize(("line", "folder"), [("0::/a/b", "sys/fs/cgroup"), ("4:memory:/a/b", "sys/fs/cgroup/memory")])
def test_limits_of_the_group_and_of_those_around_it_are_named(tmp_path: Path, line: str, folder: str):
    write(tmp_path, {"proc/self/cgroup": line + "\n"})
    write(
        tmp_path / folder, {"a/b/cpu.max": "200000 100000\n", "a/memory.max": "1073741824\n", "a/cgroup.procs": "1\n"}
    )
    write(tmp_path / folder, {"a/cpu.max": "max 100000\n", "memory.limit_in_bytes": "9223372036854771712\n"})
    assert limit_facts(tmp_path) == {
        f"cpu.max ({folder}/a/b)": "200000 100000",
        f"memory.max ({folder}/a)": "1073741824",
    }


def test_a_machine_that_says_nothing_is_no_error(tmp_path: Path):
    assert limit_facts(tmp_path) == {}
    assert cpu_facts(tmp_path)["features"] == "unknown"
    assert "memory" not in system_facts(tmp_path)


@pytest.mark.parametrize(
    ("program", "facts"),
    [
        ("echo '0, H200, 143771 MiB, 570.1, 9.0'", {"gpu 0": "H200, 143771 MiB, 570.1, 9.0"}),
        ("exit 9", {"nvidia-smi": "fails"}),
        ("true", {"nvidia-smi": "lists no GPU"}),
    ],
)
def test_gpus_are_named_by_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, facts: dict[str, str]
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = gpu_facts()
    assert found.keys() == facts.keys()
    assert all(found[name].startswith(value) for name, value in facts.items())


def test_a_driver_that_hangs_or_is_absent_is_said(monkeypatch: pytest.MonkeyPatch):
    def fail(error: Exception) -> None:
        def run(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(subprocess, "run", run)

    fail(FileNotFoundError())
    assert gpu_facts() == {"nvidia-smi": "not installed"}
    fail(subprocess.TimeoutExpired("nvidia-smi", 5))
    assert "no answer" in gpu_facts()["nvidia-smi"]
