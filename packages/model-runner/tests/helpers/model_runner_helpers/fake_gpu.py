"""GPU of fake tensors: computes nothing, but detects CPU tensors mixed with GPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmstack_kernels import dispatch, launch
from llmstack_kernels.graph_safety import no_host_synchronisation
from llmstack_kernels.launch import Launch, intercepted

DEVICE = torch.device("cuda:0")
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_CPU, _CUDA = 0, 1
_MOVES = {"_to_copy", "to"}


class FakeRuntime:
    """Satisfies `DeviceRuntime`; all results are zeros."""

    def __init__(self) -> None:
        self.device = DEVICE
        self.graph_bytes = 0

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, _Over]:
        """A tensor of the same shape and type."""
        return torch.empty(source.shape, dtype=source.dtype, device=DEVICE), _Over([])

    def fetch(self, tensors: Sequence[torch.Tensor]) -> _Over:
        """Zeros."""
        return _Over([_zeros_on_host(tensor, {}) for tensor in tensors])

    def release_cached_memory(self) -> None:
        """There is none."""

    def capture(self, work: Callable[[], None]) -> _Over:
        """Runs the work twice, the second time where waiting is an error."""
        work()
        with no_host_synchronisation(), intercepted(_check_launch):
            work()
        return _Over([])


class _Over:
    """A complete copy, or captured work."""

    def __init__(self, hosts: list[torch.Tensor]) -> None:
        self._hosts = hosts

    def wait(self) -> list[torch.Tensor]:
        return self._hosts

    def replay(self) -> None:
        pass


class FakeStreams:
    """Satisfies `CopyStreams`."""

    def __init__(self, device: torch.device) -> None:
        _check_device(device, "copies")

    def run(self, lane: object, work: Callable[[], None]) -> None:
        """At once."""
        work()

    def record(self, lane: object) -> object:
        """Anything."""
        return lane

    def wait(self, lane: object, event: object) -> None:
        """There is nothing to wait for."""

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Of the device."""
        return torch.tensor(rows).to(DEVICE)

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Fake."""
        return torch.empty(tuple(shape), dtype=dtype, device=DEVICE)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors on `DEVICE` are fake inside, those of the CPU are as ever; kernels are not started, but checked.

    Raises:
        OSError, ValueError: PyTorch is not built as this needs it.
    """
    with ExitStack() as stack:
        stack.enter_context(_guarded())
        patches: Mapping[str, Any] = {
            "llmstack_kernels.launch.is_available": lambda: True,
            "llmstack_model_runner.memory.streamed_copies.CudaCopyStreams": FakeStreams,
            "torch.cuda.get_device_capability": lambda *_: (9, 0),
            "torch.cuda.get_device_name": lambda *_: "fake",
            "torch.Tensor.pin_memory": lambda tensor: tensor,
            "torch._subclasses.fake_tensor.FakeTensor.data_ptr": lambda _: 4096,
        }
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        for cached in (dispatch.implementation, launch.supports_dependent_launch):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(intercepted(_check_launch))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_OnlyDevice())
        yield


class _OnlyDevice(TorchDispatchMode):
    """Leaves to the fake mode what concerns the device; and what the host reads of it is zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        name = func.overloadpacket.__name__
        if not has_fake and target != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name in _MOVES and target == "cuda" and not has_fake:
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device=DEVICE)
        if name in _MOVES and target == "cpu":
            return _zeros_on_host(args[0], kwargs)
        if name == "nonzero":  # as many as anything
            return torch.zeros((2, args[0].ndim), dtype=torch.int64, device=DEVICE)
        return func(*args, **kwargs)


def _zeros_on_host(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
    _check_device(tensor.device, "what goes to the host")
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)


def _check_launch(started: Launch) -> None:
    for argument in started.arguments:
        if isinstance(argument, torch.Tensor):
            _check_device(argument.device, started.kernel.__name__)


def _check_device(device: torch.device, user: str) -> None:
    if device != DEVICE:
        raise RuntimeError(f"{user}: a tensor of {device} in place of {DEVICE}")


@contextmanager
def _guarded() -> Iterator[None]:
    """PyTorch for CPUs cannot slice a tensor of a GPU, not even a fake one, for want of a guard: the CPU's does."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 2).in_dll(library, _REGISTRY)
    before = registry[_CUDA]
    registry[_CUDA] = before or registry[_CPU]
    try:
        yield
    finally:
        registry[_CUDA] = before
