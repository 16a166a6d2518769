"""Tensors in huge pages follow one another and give back their memory together."""

from __future__ import annotations

import gc
import resource
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from llmstack_kernels.native import huge_pages
from llmstack_kernels.native.huge_pages import advise_huge_pages, empty_in_huge_pages

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_REGIONS", huge_pages._Regions())


def test_tensors_follow_one_another_from_the_start_of_a_huge_page() -> None:
    sizes = [2 * MEBIBYTE + 4096, 3 * MEBIBYTE, 1 * MEBIBYTE + 2, 2 * MEBIBYTE]
    tensors = [empty_in_huge_pages(size // 2, torch.bfloat16) for size in sizes]
    assert [tensor.nbytes for tensor in tensors] == sizes
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert addresses[0] % (2 * MEBIBYTE) == 0
    gaps = [after - before - size for before, after, size in zip(addresses, addresses[1:], sizes, strict=False)]
    assert gaps == [0, 0, 4094]  # to the next small page


def test_a_tensor_larger_than_a_region_gets_one_of_its_own() -> None:
    small, large, after = (empty_in_huge_pages(size * MEBIBYTE, torch.uint8) for size in (2, 70, 2))
    large.fill_(1)
    assert large.data_ptr() % (2 * MEBIBYTE) == 0
    assert small.nbytes == after.nbytes == 2 * MEBIBYTE


def test_small_tensors_are_ordinary() -> None:
    first, second = (empty_in_huge_pages(100, torch.float32) for _ in range(2))
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 400


def test_a_region_is_freed_with_its_last_tensor() -> None:
    first, second = (empty_in_huge_pages(MEBIBYTE, torch.float32) for _ in range(2))
    assert huge_pages._REGIONS._region is not None
    region: weakref.ref = huge_pages._REGIONS._region
    del first
    gc.collect()
    assert region() is not None
    del second
    gc.collect()
    assert region() is None
    assert empty_in_huge_pages(MEBIBYTE, torch.float32).fill_(1).sum() == MEBIBYTE


def test_threads_never_get_the_same_memory() -> None:
    def filled(number: int) -> torch.Tensor:
        return empty_in_huge_pages(MEBIBYTE, torch.int32).fill_(number)

    with ThreadPoolExecutor(8) as pool:
        tensors = list(pool.map(filled, range(40)))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_a_large_tensor_is_touched_in_huge_pages_and_small_ones_stay_as_they_are() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no huge pages")
    tensor = torch.empty(96 * MEBIBYTE, dtype=torch.uint8)
    advise_huge_pages(tensor)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 12_000  # of 24,576 without
    small = torch.ones(100)
    advise_huge_pages(small)
    assert small.sum() == 100
