"""Compiles the kernels of a case for a GPU that is not there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.collect import launches_of, name_of
from llmstack_kernels.ahead_of_time.target import WARP_SIZE, Target
from llmstack_kernels.launch import Launch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as a case starts it, for one kind of GPU.

    Attributes:
        op: The operation.
        case: Name of the case.
        kernel: Name of the kernel's function; `name#2` for a second configuration within the case.
        target: The kind of GPU.
        launch: The launch that was compiled.
        binary: Triton's `CompiledKernel`, or a string: what the compiler said against it.
    """

    op: str
    case: CompileCase
    kernel: str
    target: Target
    launch: Launch
    binary: Any

    def __str__(self) -> str:
        return f"{self.op} {self.case.name} {self.kernel} sm_{self.target.arch}"


@dataclass(frozen=True, slots=True)
class _AbsentDevice:
    """Stands in for Triton's driver, which refuses to load where there is no GPU."""

    arch: int

    def get_current_device(self) -> int:
        # Triton keeps the kernels of each device apart, so each kind of GPU is one.
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, WARP_SIZE)


def compile_case(op: str, case: CompileCase, target: Target) -> list[Compiled]:
    """Compile each launch of `case` for `target`; launches of one kernel that compile to the same count once."""
    found: dict[tuple[str, str | bytes], Compiled] = {}
    numbers: Counter[str] = Counter()
    for launch in launches_of(case):
        name, binary = name_of(launch.kernel), _compile(launch, target)
        key = name, binary if isinstance(binary, str) else binary.asm["cubin"]
        if key not in found:
            numbers[name] += 1
            kernel = name if numbers[name] == 1 else f"{name}#{numbers[name]}"
            found[key] = Compiled(op, case, kernel, target, launch, binary)
    return list(found.values())


def _compile(launch: Launch, target: Target) -> Any | str:
    with _compiling_for(target):
        try:
            return launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.options)
        except Exception as error:  # whatever the compiler raises is what is asked for
            logger.debug("%s does not compile", name_of(launch.kernel), exc_info=error)
            return _as_line(error)


@contextmanager
def _compiling_for(target: Target) -> Iterator[None]:
    from triton.runtime import driver

    previous = dict(vars(driver))  # to ask for the active one would load it, and there may be no GPU
    driver.set_active(_AbsentDevice(target.arch))
    try:
        yield
    finally:
        vars(driver).update(previous)


def _as_line(error: Exception) -> str:
    """The error and its causes on one line, short enough for a table."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        parts.append(f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}")
        cause = cause.__cause__
    return " / ".join(parts)
