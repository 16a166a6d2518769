"""Memory that is touched before it is asked for, and given back where it is not."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmstack_kernels import memory_regions
from llmstack_kernels.memory_regions import REGION_BYTES, MemoryRegions

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_regions, "LEAST_S_PER_BYTE", 0.0)


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // MEBIBYTE


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def touching(regions: MemoryRegions, num_bytes: int) -> threading.Thread:
    thread = threading.Thread(target=regions.touch_ahead, args=(num_bytes,))
    thread.start()
    return thread


def fill(taken: tuple[mmap.mmap, int], num_bytes: int, number: int = 1) -> mmap.mmap:
    region, start = taken
    region[start : start + num_bytes] = bytes([number]) * num_bytes
    return region


def test_memory_that_was_touched_ahead_is_taken_without_a_page_fault() -> None:
    regions = MemoryRegions()
    fresh = MemoryRegions()
    regions.touch_ahead(2 * REGION_BYTES)
    content = b"\1" * (40 * MEBIBYTE)

    def faults(of: MemoryRegions) -> int:
        taken = [of.take(len(content)) for _ in range(2)]
        before = num_faults()
        for region, start in taken:
            region[start : start + len(content)] = content
        return num_faults() - before

    assert faults(regions) * 4 < faults(fresh)


def test_what_is_not_taken_is_given_back() -> None:
    regions = MemoryRegions()
    before = resident_mib()
    regions.touch_ahead(3 * REGION_BYTES)
    assert resident_mib() - before >= 3 * 64 - 8
    kept = fill(regions.take(10 * MEBIBYTE), 10 * MEBIBYTE)
    regions.end_touching()
    assert resident_mib() - before <= 10 + 8
    assert kept[kept.find(b"\1")] == 1


def test_the_rest_of_a_region_that_has_no_room_is_given_back() -> None:
    regions = MemoryRegions()
    regions.touch_ahead(2 * REGION_BYTES)
    before = resident_mib()
    first = regions.take(40 * MEBIBYTE)
    second = regions.take(40 * MEBIBYTE)
    assert first[0] is not second[0]
    assert 24 - 8 <= before - resident_mib() <= 24 + 8


def test_no_more_is_touched_than_will_be_asked_for() -> None:
    regions = MemoryRegions()
    thread = touching(regions, 2 * REGION_BYTES)
    taken = [regions.take(REGION_BYTES) for _ in range(2)]
    thread.join()
    regions.take(3 * REGION_BYTES)
    assert len({id(region) for region, _ in taken}) == 2
    assert not regions._touched


def test_what_is_larger_than_a_region_leaves_the_present_one_as_it_is() -> None:
    regions = MemoryRegions()
    first, start = regions.take(MEBIBYTE)
    regions.take(REGION_BYTES + MEBIBYTE)
    assert regions.take(MEBIBYTE) == (first, start + MEBIBYTE)


def test_the_largest_piece_is_touched_too_and_its_rest_is_given_back() -> None:
    regions = MemoryRegions()
    size = REGION_BYTES + 30 * MEBIBYTE
    regions.touch_ahead(REGION_BYTES, size)
    before, resident = num_faults(), resident_mib()
    region, start = regions.take(size - 20 * MEBIBYTE)
    region[start : start + 4096] = b"\1" * 4096
    assert region[start + size - 21 * MEBIBYTE] == 0
    assert num_faults() - before < 100
    assert 20 - 8 <= resident - resident_mib() <= 20 + 8
    assert regions.take(size)[0] is not region
    regions.touch_ahead(REGION_BYTES, size)
    regions.end_touching()
    assert regions._touched_large is None


@pytest.mark.parametrize("largest", [0, REGION_BYTES + MEBIBYTE])
def test_where_memory_comes_fast_one_piece_alone_is_touched(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr(memory_regions, "LEAST_S_PER_BYTE", 1.0)
    regions = MemoryRegions()
    regions.touch_ahead(3 * REGION_BYTES, largest)
    assert (len(regions._touched), regions._touched_large is None) == ((0, False) if largest else (1, True))


def test_a_touched_region_is_freed_with_its_last_user() -> None:
    regions = MemoryRegions()
    regions.touch_ahead(REGION_BYTES)
    region, _ = regions.take(MEBIBYTE)
    ended = weakref.ref(region)
    regions.end_touching()
    del region
    assert ended() is None


@pytest.mark.parametrize("num_regions", [3, 20])
def test_touching_changes_nothing_that_was_taken(num_regions: int) -> None:
    regions = MemoryRegions()
    thread = touching(regions, num_regions * REGION_BYTES // 4)
    size = 5 * MEBIBYTE
    with ThreadPoolExecutor(4) as pool:
        taken = [regions.take(size) for _ in range(num_regions)]
        list(pool.map(lambda one: fill(one[1], size, one[0] + 1), enumerate(taken)))
    thread.join()
    regions.end_touching()
    for number, (region, start) in enumerate(taken):
        assert region[start : start + size] == bytes([number + 1]) * size


def test_regions_need_no_torch() -> None:
    code = "import sys, llmstack_kernels.memory_regions; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
