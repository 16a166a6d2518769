"""What starts a kernel again is what Triton would start, for any arguments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from llmstack_kernels.cached_launch import LaunchCache


def _add_scaled(x, y, out, size, offset, factor, SIZE: tl.constexpr, IS_LOUD: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = offset + tl.arange(0, SIZE)
    values = tl.load(x + columns, mask=columns < size, other=0.0) * factor
    if y is not None:
        values += tl.load(y + columns, mask=columns < size, other=0.0)
    if IS_LOUD:
        values *= 2.0
    tl.store(out + columns, values, mask=columns < size)


class Launcher:
    """Stands in for the code that starts a kernel: it notes what it is given."""

    started: list[tuple[Any, ...]]

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        Launcher.started.append(arguments)


class Utilities:
    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[Any, ...]:
        return "module", hash(binary), 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


class Driver:
    """A GPU for which kernels are compiled, and on which none runs."""

    utils, launcher_cls, device = Utilities(), Launcher, 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    Launcher.started = []
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    return found


@pytest.fixture
def kernel() -> Any:
    return JITFunction(_add_scaled)


def plainly(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a launcher is given, with addresses in place of tensors, and without what is for hooks alone."""
    shown = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
    return (*shown[:6], *shown[9:])


def started_by(cache: LaunchCache | None, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    Launcher.started.clear()
    if cache is None:
        kernel[grid](*arguments, **options)
    else:
        cache.start(kernel, grid, arguments, options)
    (noted,) = Launcher.started
    return noted


def test_any_arguments_start_what_triton_starts(gpu: Driver, kernel: Any) -> None:
    """Addresses and numbers of all kinds in turns: the code, its constants and all values."""
    memory = torch.zeros(64)
    wide = torch.zeros(64, dtype=torch.bfloat16)
    cache, kinds, functions = LaunchCache(), set(), set()
    xs, ys = (memory, memory[1:], wide), (None, memory)
    for number, (x, y, size, offset) in enumerate(itertools.product(xs, ys, (1, 7, 32, 1 << 40), (0, 48))):
        if number % 3 and size > 7:
            continue  # each kind of arguments is compiled
        for is_loud, grid in ((True, (3,)), (False, (2, 5))):
            options = {"SIZE": 16, "IS_LOUD": is_loud, "num_warps": 1, "num_stages": 1}
            arguments = (x, y, memory, size, offset, 0.5)
            expected = started_by(None, kernel, grid, *arguments, **options)
            for _ in range(2):
                found = started_by(cache, kernel, grid, *arguments, **options)
                assert plainly(found) == plainly(expected)
            assert found[6:9] == (None, None, None)  # no hooks: this start was the cache's own
            functions.add(expected[4])
            kinds.add((x.data_ptr() % 16, x.dtype, y is None, size, is_loud))  # both offsets are multiples of 16
    assert len(cache) == len(kinds)
    assert len(functions) > 8


def test_a_stream_and_a_device_are_those_of_the_moment(gpu: Driver, kernel: Any) -> None:
    cache, x = LaunchCache(), torch.zeros(16)
    arguments, options = (x, None, x, 16, 0, 1.0), {"SIZE": 16, "IS_LOUD": False, "num_warps": 1, "num_stages": 1}
    for device, is_known in ((0, 1), (0, 1), (1, 2), (0, 2)):
        gpu.device = device
        assert started_by(cache, kernel, (1,), *arguments, **options)[3] == 1000 + device
        assert len(cache) == is_known


def test_hooks_learn_of_each_start(gpu: Driver, kernel: Any) -> None:
    cache, x = LaunchCache(), torch.zeros(16)
    arguments, options = (x, None, x, 16, 0, 1.0), {"SIZE": 16, "IS_LOUD": False, "num_warps": 1, "num_stages": 1}
    started_by(cache, kernel, (1,), *arguments, **options)

    def learn(_: Any) -> None:
        raise AssertionError("the launcher calls it, and this one does not")

    triton.knobs.runtime.launch_enter_hook.add(learn)
    try:
        noted = started_by(cache, kernel, (1,), *arguments, **options)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(learn)
    assert noted[7] is triton.knobs.runtime.launch_enter_hook


def test_what_types_do_not_distinguish_is_left_to_triton(gpu: Driver, kernel: Any) -> None:
    """A constant among the arguments, whose value decides, and numbers of more than 64 bits."""
    cache, x = LaunchCache(), torch.zeros(16)
    functions = {
        started_by(cache, kernel, (1,), x, None, x, 16, 0, 1.0, size, IS_LOUD=False, num_warps=1)[4]
        for size in (2, 4, 8, 4)
    }
    assert len(functions) == 3
    assert len(cache) == 0
    with pytest.raises(OverflowError):
        cache.start(kernel, (1,), (x, None, x, 1 << 70, 0, 1.0), {"SIZE": 16, "IS_LOUD": False})
