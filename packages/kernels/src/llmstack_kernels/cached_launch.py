"""Starts of Triton kernels without Triton's search for their code.

The search takes longer than many kernels run: Triton binds the arguments to parameters, specializes each, and compares
a text of all options, in 12 to 19 µs. What it finds depends on the types of the arguments, and on few facts about their
values. Here these facts are the key of a dictionary, which has what Triton found for the same ones before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_INT32 = 1 << 31
_INT64 = 1 << 63
_TENSOR = torch.Tensor


class _Compiled(NamedTuple):
    """Code of a kernel, and the constants that its launcher expects behind the arguments."""

    kernel: Any  # kept, so that no other one gets its number
    run: Callable[..., None]
    function: Any
    packed_metadata: Any
    constants: tuple[Any, ...]


class LaunchCache:
    """Starts kernels, each kind of arguments by Triton for the first time.

    `CompiledKernel.run` is called as `JITFunction.run` calls it in Triton 3.5 to 3.9.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], _Compiled] = {}

    def __len__(self) -> int:
        """Kinds of starts that are known."""
        return len(self._found)

    def start(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """As `kernel[grid](*arguments, **options)`, on the current stream of the current device."""
        described = None if type(kernel) is not JITFunction or _has_hooks(kernel) else _describe(arguments)
        if described is None:
            kernel[grid](*arguments, **options)
            return
        facts, values = described
        active = driver.active
        device = active.get_current_device()
        key = (id(kernel), device, *facts, *options, *options.values())
        compiled = self._found.get(key)
        if compiled is None:
            self._note(key, kernel, kernel[grid](*arguments, **options), options, len(arguments))
            return
        first, second, third = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        _, run, function, metadata, constants = compiled
        run(first, second, third, stream, function, metadata, None, None, None, *values, *constants)

    def _note(
        self, key: tuple[object, ...], kernel: Any, compiled: Any, options: dict[str, Any], num_arguments: int
    ) -> None:
        """Keeps what Triton has started, unless constants stand among the arguments, or are those of the kernel."""
        names = kernel.arg_names[num_arguments:]
        is_plain = not any(param.is_constexpr for param in kernel.params[:num_arguments])
        if is_plain and all(name in options for name in names):
            constants = tuple(options[name] for name in names)
            self._found[key] = _Compiled(kernel, compiled.run, compiled.function, compiled.packed_metadata, constants)


def _has_hooks(kernel: Any) -> bool:
    """Whether a profiler or another caller is to be notified of each start."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or kernel.pre_run_hooks)


def _describe(arguments: Sequence[Any]) -> tuple[list[object], list[Any]] | None:
    """Facts that Triton may specialize by, one per argument, and values for the launcher; None for other arguments.

    Triton knows whether a pointer or a number is a multiple of 16, whether a number is 1, and how many bits it needs.
    """
    facts: list[object] = []
    values: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is _TENSOR:
            argument, fact = (pointer := argument.data_ptr()), argument.dtype
            if pointer & 15:
                fact = (fact, 0)
        elif kind is int:
            fact = 1 if argument == 1 else argument & 15 and 2
            if not -_INT32 <= argument < _INT32:
                if not -_INT64 <= argument < _INT64:
                    return None
                fact += 16
        elif kind is float or argument is None:
            fact = kind
        else:
            return None
        facts.append(fact)
        values.append(argument)
    return facts, values
