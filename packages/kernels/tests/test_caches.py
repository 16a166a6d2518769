"""The caches of a processor are read from Linux, else from the processor, and cut what kernels take at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_kernels import caches
from llmstack_kernels.caches import ENVIRONMENT_VARIABLE, CacheSizes, Cuts, cache_sizes, parse_cache_sizes

KIB, MIB = 1 << 10, 1 << 20


def write_cpu(root: Path, cpu: int, threads: str, levels: dict[str, tuple[str, str]]) -> None:
    """`levels`: Level and kind, such as `1 Data`, to size and the processors that share it."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    (folder / "topology").mkdir(parents=True)
    (folder / "topology/thread_siblings_list").write_text(threads + "\n")
    for number, (name, (size, shared)) in enumerate(levels.items()):
        level, kind = name.split()
        index = folder / f"cache/index{number}"
        index.mkdir(parents=True)
        for file, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items():
            (index / file).write_text(text + "\n")


def use_cpus(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))


def write_server(root: Path, num_cpus: int = 8) -> None:
    """Cores of two threads; all share one L3."""
    for cpu in range(num_cpus):
        threads = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        levels = {"1 Instruction": ("64K", threads), "1 Data": ("32K", threads), "2 Unified": ("512K", threads)}
        write_cpu(root, cpu, threads, levels | {"3 Unified": ("32768K", f"0-{num_cpus - 1}")})


def test_threads_of_a_core_share_its_caches_and_usable_processors_share_l3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_server(tmp_path)
    use_cpus(monkeypatch, 0, 1, 4, 5)
    expected = CacheSizes(32 * KIB, 512 * KIB, 8 * MIB, 32 * MIB, "sysfs")
    assert caches.read_cache_sizes(tmp_path) == expected
    assert str(expected) == "L1d 32K, L2 512K, L3 8M a core of 32M (sysfs)"


def test_a_quota_of_processor_time_leaves_fewer_that_share_l3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_server(tmp_path)
    use_cpus(monkeypatch, *range(8))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    assert caches.read_cache_sizes(tmp_path).l3 == 16 * MIB


def test_of_different_cores_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cpu(tmp_path, 0, "0-1", {"1 Data": ("48K", "0-1"), "2 Unified": ("2M", "0-1"), "3 Unified": ("30M", "0-5")})
    for cpu in range(2, 6):  # small cores, four of which share one L2
        levels = {"1 Data": ("32K", str(cpu)), "2 Unified": ("4096K", "2-5"), "3 Unified": ("30M", "0-5")}
        write_cpu(tmp_path, cpu, str(cpu), levels)
    use_cpus(monkeypatch, 0, 2, 3, 4, 5)
    assert caches.read_cache_sizes(tmp_path) == CacheSizes(32 * KIB, MIB, 6 * MIB, 30 * MIB, "sysfs")


@pytest.mark.parametrize("size", ["", "0K", "much", "9" * 30 + "K", "64"])
def test_what_linux_hides_or_garbles_comes_from_the_processor_or_is_a_default(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cpu(tmp_path, 0, "", {"1 Data": (size, "nobody"), "2 Unified": (size, "3-"), "3 Unified": (size, "")})
    use_cpus(monkeypatch, 0)
    monkeypatch.setattr(os, "sysconf", {188: 48 * KIB, 191: MIB}.__getitem__)
    assert caches.read_cache_sizes(tmp_path) == CacheSizes(48 * KIB, MIB, 2 * MIB, 32 * MIB, "cpuid")
    caches.read_cache_sizes.cache_clear()
    monkeypatch.setattr(os, "sysconf", lambda _: -1)
    assert caches.read_cache_sizes(tmp_path) == CacheSizes()


def test_the_environment_states_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpus(monkeypatch, 0, 1)
    monkeypatch.setattr(caches, "num_usable_cpus", lambda: 2)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "32k, 524288,4M")
    assert cache_sizes() == CacheSizes(32 * KIB, 512 * KIB, 4 * MIB, 8 * MIB, "environment")
    assert caches.describe().startswith("L1d 32K, L2 512K, L3 4M a core of 8M (environment): stretch 8K, ")


@pytest.mark.parametrize(
    "text", ["32K", "32K,512K", "32K,512K,4M,1G", "32K,512K,", "a,b,c", "-1,2,3", "1K,512K,4M", "32K,512K,2G"]
)
def test_other_texts_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^LLMSTACK_CACHE_SIZES takes the sizes of L1, L2 .*; not '") as caught:
        parse_cache_sizes(text)
    assert str(caught.value).endswith(f"not {text!r}.")


def test_a_wrong_text_ends_the_start() -> None:
    code = "from llmstack_kernels.native import NativeLibrary, supported_variants as found; NativeLibrary(found()[0])"
    environment = os.environ | {ENVIRONMENT_VARIABLE: "large"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    sentence = (
        "LLMSTACK_CACHE_SIZES takes the sizes of L1, L2 and of a core's share of L3, each from 4K to 1G, such as "
    )
    assert done.stderr.endswith(f"ValueError: {sentence}32K,512K,4M; not 'large'.\n")


def test_each_rule_gives_what_was_tuned_by_hand_on_a_processor_with_1_mib() -> None:
    cuts = Cuts.of(CacheSizes(48 * KIB, MIB, 16 * MIB))
    assert cuts == Cuts(
        16 * KIB, 8 * KIB, 16 * KIB, 256 * KIB, 192 * KIB, 512 * KIB, 4 * MIB, 128 * KIB, 64, 256 * KIB
    )  # fmt: skip
    assert Cuts.of(CacheSizes(48 * KIB, 2 * MIB)).row_part == MIB  # of tiles (AMX)


def test_each_cut_fits_its_cache_and_is_never_nothing() -> None:
    for l1 in (4 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 192 * KIB, 1 << 30):
        for l2 in (4 * KIB, 64 * KIB, 512 * KIB, 8 * MIB, 1 << 30):
            cuts = Cuts.of(CacheSizes(l1, l2, 4 * KIB))
            assert 512 <= cuts.stretch <= l1 // 3
            assert 512 <= cuts.few_rows_stretch <= l1 // 4
            assert 0 < cuts.panel_part <= cuts.panel <= l2 // 4
            assert cuts.panel_part + cuts.row_part < l2
            assert cuts.key_stretch >= 32
            assert cuts.key_stretch & (cuts.key_stretch - 1) == 0


def test_caches_are_read_without_pytorch() -> None:
    code = "import sys, llmstack_kernels.caches as caches; print(caches.describe()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == caches.describe() + "\n"
