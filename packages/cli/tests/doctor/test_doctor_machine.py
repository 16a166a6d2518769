"""Findings about the machine, from files and tools that stand in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmstack_command.doctor import machine
from llmstack_command.doctor.finding import Finding

GIB = 1 << 30


def write_machine(root: Path, *, free_kib: int, limit: int | None = None) -> None:
    files = {"proc/meminfo": f"MemTotal: 8388608 kB\nMemAvailable: {free_kib} kB\n", "proc/self/cgroup": "0::/\n"}
    if limit is not None:
        files |= {"sys/fs/cgroup/memory.max": f"{limit}\n", "sys/fs/cgroup/memory.current": "0\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def only(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    return finding


@pytest.fixture
def without_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_module", lambda name: None)


@pytest.mark.usefixtures("without_siblings")
def test_memory_is_named_where_only_the_command_is_installed(tmp_path: Path):
    write_machine(tmp_path, free_kib=1048576)
    assert only(machine.memory(tmp_path)) == Finding("memory", "ok", "1.0 GiB free")


def test_memory_is_what_the_control_group_leaves(tmp_path: Path):
    pytest.importorskip("llmstack_model_runner.device.host_limits")
    write_machine(tmp_path, free_kib=4194304, limit=2 * GIB)
    found = only(machine.memory(tmp_path))
    assert (found.state, found.text) == (
        "ok", "2.0 GiB free of 2.0 GiB, the limit of the control group (the machine has 8.0 GiB)",
    )  # fmt: skip


def test_little_memory_has_a_remedy(tmp_path: Path):
    pytest.importorskip("llmstack_model_runner.device.host_limits")
    write_machine(tmp_path, free_kib=524288)
    found = only(machine.memory(tmp_path))
    assert (found.state, found.text) == ("note", "0.5 GiB free of 8.0 GiB")
    assert "--kv-cache-memory-bytes" in found.remedy


def test_caches_are_those_that_kernels_are_cut_to(monkeypatch: pytest.MonkeyPatch):
    caches = pytest.importorskip("llmstack_kernels.caches")
    monkeypatch.setenv(caches.ENVIRONMENT_VARIABLE, "32K,512K,4M")
    found = only(machine.caches())
    assert (found.name, found.state) == ("caches", "ok")
    assert found.text.startswith("L1d 32K, L2 512K, L3 4M a core of ")
    assert "(environment): stretch 8K, " in found.text
    monkeypatch.setattr(machine, "package_module", lambda name: None)
    assert not list(machine.caches())


@pytest.mark.parametrize(
    ("cuda", "text"), [("'12.8'", "2.13.0, for CUDA 12.8"), ("None", "2.13.0, for processors alone")]
)
def test_the_build_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, text: str
):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert only(machine.torch()) == Finding("torch", "ok", text)


def test_no_torch_prevents_serving(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    found = only(machine.torch())
    assert (found.state, found.text) == ("problem", "not installed")
    assert found.remedy.startswith("pip install torch")


@pytest.mark.parametrize(
    ("build", "seen", "state", "words"),
    [
        (("2.13.0+cpu", None), "no", "note", "this build of torch cannot use it"),
        (("2.13.0", "12.8"), "no", "note", "torch does not see it"),
        (("2.13.0", "12.8"), "yes", "ok", "H200, 143771 MiB"),
    ],
)
def test_a_gpu_is_named_and_whether_torch_can_use_it(
    monkeypatch: pytest.MonkeyPatch, build: tuple[str, str | None], seen: str, state: str, words: str
):
    monkeypatch.setattr(machine, "gpu_facts", lambda: {"gpu 0": "H200, 143771 MiB, 570.1, 9.0"})
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    monkeypatch.setattr(machine, "start_probe", lambda: None)
    monkeypatch.setattr(machine, "import_facts", lambda probe: {"torch sees a GPU": seen})
    found = only(machine.gpu())
    assert found.state == state
    assert words in found.text
    assert bool(found.remedy) == (state != "ok")


def test_a_machine_without_a_gpu_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "gpu_facts", lambda: {"nvidia-smi": "not installed"})
    monkeypatch.setattr(machine, "start_probe", lambda: pytest.fail("torch was imported"))
    assert only(machine.gpu()).text == "none (nvidia-smi: not installed)"
