"""A CPU stand-in of a GPU, which raises where a GPU would go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmstack_kernels.graph_safety import is_host_standing_in, no_host_synchronisation, start_kernel
from llmstack_kernels.launch import Launch, intercepted
from llmstack_model_runner.device.runtime import Fetched, Graph, Transfer
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig

_POISON = 0xA5


class DeviceRuleError(RuntimeError):
    """On a GPU a value would be read too early, written too early, or kept from the time of the capture."""


class CpuStandIn:
    """Satisfies `DeviceRuntime` on tensors of the CPU.

    Asynchronous work is executed at once, so results are correct if the rules are followed. A broken rule raises:
    staging memory must not change during a copy, results must not be read before their copy is complete or overwritten
    during it, and a captured graph must compute what its code would.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graph_bytes = 0
        self._sends: list[_StandInTransfer] = []

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Poisoned memory, so that no code relies on zeros."""
        return torch.full((num_bytes,), _POISON, dtype=torch.uint8)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Raises for memory that a copy in flight may still be reading."""
        self._sends = [transfer for transfer in self._sends if not transfer.is_over]
        for transfer in self._sends:
            if transfer.overlaps(source):
                raise DeviceRuleError("staging memory is used again before its copy was waited for")
        transfer = _StandInTransfer(source)
        self._sends.append(transfer)
        return source.clone(), transfer

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """The values appear when they are waited for."""
        return _StandInFetched(tensors)

    def release_cached_memory(self) -> None:
        """PyTorch keeps none on a CPU."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Executes the work once, and again while its operations are noted."""
        work()
        return _StandInGraph(work)


class _StandInTransfer:
    def __init__(self, source: torch.Tensor) -> None:
        self.is_over = False
        self._source = source
        self._sent = source.clone()

    def overlaps(self, other: torch.Tensor) -> bool:
        start, end = other.data_ptr(), other.data_ptr() + other.nbytes
        return start < self._source.data_ptr() + self._source.nbytes and self._source.data_ptr() < end

    def wait(self) -> None:
        if not self.is_over and not torch.equal(self._source, self._sent):
            raise DeviceRuleError("staging memory was written before its copy was waited for")
        self.is_over = True


class _StandInFetched:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = list(tensors)
        self._values = [tensor.clone() for tensor in tensors]
        # Seen by code that keeps a reference instead of waiting.
        self._hosts = [_poisoned_like(tensor) for tensor in tensors]
        self._is_over = False

    @torch.inference_mode()
    def wait(self) -> list[torch.Tensor]:
        if not self._is_over:
            for host, source, value in zip(self._hosts, self._sources, self._values, strict=True):
                if not torch.equal(_bytes(source), _bytes(value)):
                    raise DeviceRuleError("a result was overwritten before its copy to the host was waited for")
                host.copy_(value)
            self._is_over, self._sources = True, []
        return self._hosts


class _StandInGraph:
    """Captured work with its noted operations, which a GPU would repeat whatever has changed since."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._captured = _carry_out(work)

    def replay(self) -> None:
        done = _carry_out(self._work)
        if len(done) != len(self._captured):
            raise DeviceRuleError(f"{len(self._captured)} operations were captured, now it would be {len(done)}")
        for captured, now in zip(self._captured, done, strict=True):
            if captured != now:
                raise DeviceRuleError(f"{captured} was captured, now it would be {now}")


def _carry_out(work: Callable[[], None]) -> list[tuple[object, ...]]:
    notes = _Notes()
    with no_host_synchronisation(), notes, intercepted(notes.start_kernel):
        work()
    return notes.operations


class _Notes(TorchDispatchMode):
    """Notes each operation and kernel with its numbers, its shapes, and the addresses of all that was there before.

    Memory made inside has other addresses each time on a CPU; a GPU gives a graph memory of its own. Code that
    takes a kernel's place on a CPU is not noted: a kernel would have read lengths on the device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.operations: list[tuple[object, ...]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is given out twice

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = [self._describe(value) for value in (*args, *(kwargs or {}).values())]
        known = {value.untyped_storage().data_ptr() for value in _tensors((*args, *(kwargs or {}).values()))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((out,)):
            if tensor.untyped_storage().data_ptr() not in known:
                self._made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        if not is_host_standing_in():
            self.operations.append((str(func), *inputs))
        return out

    def start_kernel(self, launch: Launch) -> None:
        """Notes a kernel's scalar arguments, which a graph would repeat, so lengths must come from memory."""
        arguments = [self._describe(value) for value in (*launch.arguments, *sorted(launch.options.items()))]
        self.operations.append((launch.kernel.__name__, launch.grid, *arguments))
        start_kernel(launch)

    def _describe(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            is_made = value.untyped_storage().data_ptr() in self._made
            return (tuple(value.shape), value.stride(), value.dtype, "made" if is_made else value.data_ptr())
        if isinstance(value, list | tuple):
            return tuple(self._describe(part) for part in value)
        return value


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals itself here."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    poisoned = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.numel():
        _bytes(poisoned).fill_(_POISON)
    return poisoned


class StandInModelRunner(ModelRunner):
    """A runner on the CPU stand-in of a GPU; an engine core finds it by its name, `module:Class`."""

    def __init__(self, config: ModelRunnerConfig) -> None:
        super().__init__(config, CpuStandIn())
