"""A guard for code that must not make the host wait; it works on a CPU too.

What is recorded as a CUDA graph, or runs ahead of the device, must not read a tensor's values on the host, make shapes
of them, or send it values from the host. On a card such code is slow or refused while it is recorded; on a CPU it
works without a word. Inside `no_host_synchronisation` it raises on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from llmstack_kernels.launch import Launch, intercepted

# Names of functions of `torch`, and of methods and conversions of its tensors.
_READS = {"allclose", "cpu", "equal", "item", "numpy", "storage", "tolist"}
_CONVERTS = {"array", "bool", "complex", "contains", "dlpack", "float", "format", "index", "int", "repr"}
_SENDS = {"as_tensor", "asarray", "cuda", "new_tensor", "pin_memory", "tensor"}
_MAKES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros"}
_MASKABLE = {"index", "index_put", "index_put_"}

_host_stands_in: ContextVar[bool] = ContextVar("_host_stands_in", default=False)


class HostSynchronisationError(RuntimeError):
    """The host would wait for the device, or the device for values of the host."""


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    """Raises `HostSynchronisationError` where code inside would make the host and the device wait for each other.

    That is: reading values (`item`, `tolist`, `cpu`, `numpy`, a condition on a tensor), shapes that depend on values
    (`nonzero`, an index by a mask), sending values (`torch.tensor`, an index by a list, a move to a device), and
    tensors made with no device named, which are the host's. Triton kernels inside run as ever.
    """
    with _FunctionGuard(), _OperationGuard(), intercepted(start_kernel):
        yield


@contextmanager
def host_stands_in() -> Iterator[None]:
    """Lifts the guard for code that takes a kernel's place on a CPU and reads values as the kernel would."""
    token = _host_stands_in.set(True)
    try:
        yield
    finally:
        _host_stands_in.reset(token)


def is_host_standing_in() -> bool:
    """True inside `host_stands_in`, and in kernels that run in Triton's interpreter."""
    return _host_stands_in.get()


def start_kernel(launch: Launch) -> None:
    """Starts a Triton kernel inside the guard; interceptors of launches pass them on to this."""
    # Triton's interpreter is such code: it computes on the values of its arguments with NumPy.
    with host_stands_in():
        if 0 not in launch.grid:
            launch.kernel[launch.grid](*launch.arguments, **launch.options)


class _FunctionGuard(TorchFunctionMode):
    """Sees the calls that PyTorch answers without an operation of the device, such as `tolist`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _host_stands_in.get():
            _check_function(func.__name__, args, kwargs)
        return func(*args, **kwargs)


def _check_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if name in _READS or (name.startswith("__") and name.strip("_") in _CONVERTS):
        raise HostSynchronisationError(f"{name} reads a tensor's values on the host.")
    if name in _SENDS or (name in ("__getitem__", "__setitem__") and _is_host_index(args[1])):
        raise HostSynchronisationError(f"{name} sends values from the host to the device.")
    if name == "to" and ("device" in kwargs or any(isinstance(value, str | torch.device) for value in args[1:])):
        raise HostSynchronisationError("to moves a tensor between the host and the device.")
    if name in _MAKES and kwargs.get("device") is None:
        raise HostSynchronisationError(f"{name} names no device, so the tensor is made on the host.")


def _is_host_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | range) or type(part).__module__ == "numpy" for part in parts)


class _OperationGuard(TorchDispatchMode):
    """Sees every operation, however deep inside PyTorch it is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own has no annotations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _host_stands_in.get():
            _check_operation(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _check_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = func.overloadpacket.__name__
    if name in _MASKABLE:
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            raise HostSynchronisationError(f"{name} by a mask counts its true values on the host.")
    elif torch.Tag.data_dependent_output in func.tags:
        raise HostSynchronisationError(f"{name} reads a tensor's values on the host.")
    elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        raise HostSynchronisationError(f"{name} makes a shape of a tensor's values, which the host must read.")
