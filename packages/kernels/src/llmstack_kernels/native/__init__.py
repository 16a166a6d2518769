"""The library of native kernels for this processor, and its thread count."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmstack_kernels.build_native import is_built, is_stale, library_path, runnable_variants, tiles_refusal
from llmstack_kernels.caches import CacheSizes, Cuts, cache_sizes
from llmstack_kernels.dispatch import forced_variant, forces_reference

if TYPE_CHECKING:
    from llmstack_kernels.native.capture import CapturedCalls

logger = logging.getLogger(__name__)

Pointer = ctypes.c_void_p
Int = ctypes.c_int64
Float = ctypes.c_float

# Suffix of the functions for each storage type.
DTYPE_TO_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

# As in elementwise.h.
ACTIVATION_TO_CODE = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "relu_squared": 5}


REBUILD = "run 'make setup' in the clone, or 'python -m llmstack_kernels.build_native'"


class StaleLibraryError(ValueError):  # so that the start of an engine passes its text on
    """The native kernels were built from other sources than those that are installed."""


def supported_variants() -> list[str]:
    """The variants that this processor can run and that are built from the present sources, best first."""
    return [name for name in runnable_variants() if is_built(name)]


@cache  # every operation of a step asks for it
def require_library() -> NativeLibrary:
    """The library; backends that are available may call this."""
    found = library()
    if found is None:
        raise RuntimeError("the native kernels are not built")
    return found


@cache
def library() -> NativeLibrary | None:
    """The library of the variant that LLMSTACK_KERNELS names, else of the best one that is built for this processor.

    None, with a warning, where none was built.

    Raises:
        ValueError: The named variant is not built or cannot run here.
        StaleLibraryError: The sources are newer than the library. PyTorch code would be many times as slow.
    """
    forced = forced_variant(supported_variants())
    if forced is not None:
        return NativeLibrary(forced)
    found = next((name for name in runnable_variants() if library_path(name).is_file()), None)
    if found is None:
        logger.warning("The native kernels are not built, so slower PyTorch code runs: %s.", REBUILD)
        return None
    if tiles_refusal():
        logger.warning("The processor has AMX, and the system refuses it to this process: %s.", tiles_refusal())
    if is_stale(found):
        if forces_reference():
            return None
        raise StaleLibraryError(
            f"The native kernels are older than their sources: {REBUILD}. "
            "(LLMSTACK_KERNELS=reference does without them, slowly.)"
        )
    return NativeLibrary(found)


def is_available() -> bool:
    """Whether a library was built for this processor."""
    return library() is not None


def describe() -> str:
    """The variant that runs."""
    return str(library())


class _Captures(threading.local):
    current: CapturedCalls | None = None


class NativeLibrary:
    """The functions of one variant.

    Attributes:
        variant: Kind of processor it was compiled for.
        has_threads: Whether it uses as many threads as PyTorch; if not, it computes on the calling thread.
        captures: Its `current`, if any, captures the calls that the same thread makes.
    """

    def __init__(self, variant: str) -> None:
        """Loads it; OSError if it cannot be, ValueError for sizes of caches that are none."""
        self.variant = variant
        self._library = ctypes.CDLL(str(library_path(variant)))
        self._functions: dict[str, Callable[..., None]] = {}
        self.captures = _Captures()
        self.has_threads = self._learn_num_threads()
        self.fit(cache_sizes())

    def fit(self, sizes: CacheSizes) -> None:
        """Cuts what kernels take at a time to caches of these sizes, for all threads. Bits do not change."""
        cuts = dataclasses.astuple(Cuts.of(sizes))
        self.function("set_cuts", Pointer)((Int * len(cuts))(*cuts))

    def function(self, name: str, *argument_types: type) -> Callable[..., None]:
        """The native function `llmstack_<name>`, which has no result."""
        function = self._functions.get(name) or self._bind(name, argument_types)
        capture = self.captures.current
        return function if capture is None else capture.wrap(name, function, argument_types)

    def address(self, name: str) -> int:
        """The address of the native function `llmstack_<name>`."""
        return int(ctypes.cast(self._library[self._symbol(name)], Pointer).value or 0)

    def __str__(self) -> str:
        notes = ["one thread"] if not self.has_threads else []
        if self.variant == "avx512bf16" and tiles_refusal():
            notes.append("AMX refused")
        return ", ".join([self.variant, *notes])

    def _bind(self, name: str, argument_types: tuple[type, ...]) -> Callable[..., None]:
        function = self._library[self._symbol(name)]
        function.argtypes = argument_types
        function.restype = None
        self._functions[name] = function
        return function

    def _symbol(self, name: str) -> str:
        """A function of this variant alone, in a library that it shares, is in place of the other's."""
        own = f"llmstack_{self.variant}_{name}"
        return own if hasattr(self._library, own) else f"llmstack_{name}"

    def _learn_num_threads(self) -> bool:
        runtime = _openmp_runtime()
        if runtime is None:
            return False
        self.function("set_threads", Pointer)(ctypes.cast(runtime.omp_get_max_threads, Pointer))
        return True


@cache
def _openmp_runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that PyTorch has loaded, which knows how many threads it may use.

    Where several are loaded, a preloaded one of Intel's or LLVM's serves PyTorch.
    """
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "omp" in line.rpartition("/")[2] and ".so" in line}
    for path in sorted(paths, key=lambda path: "gomp" in path):
        runtime = ctypes.CDLL(path)
        if hasattr(runtime, "omp_get_max_threads"):
            return runtime
    return None
