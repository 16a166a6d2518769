"""Launches of Triton kernels: on a GPU, in the interpreter, or compiled only."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from llmstack_kernels.cached_launch import LaunchCache

Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a kernel's start; `options` hold `num_warps`, `num_stages` and the constants."""

    kernel: Any
    grid: Grid
    arguments: tuple[Any, ...]
    options: dict[str, Any]


_listener: ContextVar[Callable[[Launch], None] | None] = ContextVar("_listener", default=None)


def launch(kernel: Any, grid: Grid, *arguments: Any, num_warps: int = 4, num_stages: int = 1, **options: Any) -> None:
    """Start `kernel` for each point of `grid`.

    Args:
        kernel: A function under `triton.jit`.
        grid: Numbers of programs along up to three axes.
        arguments: The arguments of the kernel, in order; tensors are passed as pointers.
        num_warps: Warps of 32 threads per program.
        num_stages: Depth of the software pipeline.
        options: Constants of the kernel by name, and further options of the compiler such as `launch_pdl`.
    """
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    listener = _listener.get()
    if listener is not None:
        listener(Launch(kernel, grid, arguments, options))
    elif 0 not in grid:
        _launch_cache().start(kernel, grid, arguments, options)


@cache
def _launch_cache() -> LaunchCache:
    """One for the process; its module imports Triton."""
    from llmstack_kernels.cached_launch import LaunchCache

    return LaunchCache()


@contextmanager
def intercepted(listener: Callable[[Launch], None]) -> Iterator[None]:
    """Hands every launch inside the block to `listener`, and starts none on the device."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can be started while the one before it ends (`launch_pdl`, and `gdc_wait` in the kernel).

    True for meta tensors, with which kernels are compiled ahead of time.
    """
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def is_interpreted() -> bool:
    """True where Triton runs kernels on the CPU, step by step (`TRITON_INTERPRET=1`): right, and very slow."""
    import triton

    return bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False


def is_available() -> bool:
    """True when Triton is installed and has something to run kernels on."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or is_interpreted())


def describe() -> str:
    """Triton's version and where it runs."""
    import triton

    place = "interpreted" if is_interpreted() else torch.cuda.get_device_name()
    return f"{triton.__version__}, {place}"
