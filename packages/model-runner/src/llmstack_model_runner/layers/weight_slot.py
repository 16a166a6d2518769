"""Weight slots: the tensors that a model expects from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight


class WeightKind(Enum):
    """Role of a tensor, which decides its values in dummy weights. Only a bound may be infinite."""

    MATRIX = "matrix"
    SCALE = "scale"
    BIAS = "bias"
    BOUND = "bound"


class Sliceable(Protocol):
    """A tensor, in memory or in a file, of which a part can be read."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part of the tensor."""
        ...


class FileTensor(Protocol):
    """A tensor in a file, which is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    def read(self, part: WeightPart | None) -> torch.Tensor:
        """A part of the tensor, or all of it."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The part of a tensor that one rank reads: runs of rows (dimension 0) or of columns (dimension 1).

    Attributes:
        runs: Ascending and apart from each other; none reads nothing.
    """

    dim: int
    runs: tuple[range, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def read(self, tensor: Sliceable) -> torch.Tensor:
        """The runs, one after the other; only they are read from a file."""
        before = (slice(None),) * self.dim
        pieces = [tensor[(*before, slice(run.start, run.stop))] for run in self.runs or (range(0),)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


_PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One expected tensor.

    Attributes:
        shape: Shape in the checkpoint.
        load: Loads the tensor, or its `part`, in any floating type, on the CPU or on the model's device. It is called
            once and may keep the tensor.
        load_stored: The same for a whole quantized weight [out_features, in_features]; None where none is supported.
        load_table: The same for a table of a GGUF file, which it widens; None where rows are not looked up.
        stored_shape: Its shape, where it is not `shape`.
        part: The part of the tensor that is read; None for all of it.
        skip: Called instead of the others where nothing is read: the layer was packed before, or is another rank's.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    kind: WeightKind = WeightKind.MATRIX
    load_stored: Callable[[AnyStoredWeight], None] | None = None
    load_table: Callable[[AnyStoredWeight], None] | None = None
    stored_shape: tuple[int, ...] | None = None
    part: WeightPart | None = None
    skip: Callable[[], None] | None = None

    def fits(self, tensor: torch.Tensor | FileTensor | AnyStoredWeight) -> bool:
        """Whether `tensor` has the shape; a single number may have any number of dimensions."""
        if isinstance(tensor, AnyStoredWeight):
            return tuple(tensor.shape) == (self.stored_shape or self.shape)
        return tuple(tensor.shape) == self.shape or (self.shape == () and math.prod(tensor.shape) == 1)

    def put(self, tensor: torch.Tensor | FileTensor | AnyStoredWeight) -> None:
        """Loads the slot's part of a tensor, or a quantized weight.

        Raises:
            ValueError: It is quantized and must not be, has no plain floating type, or is not finite.
        """
        if isinstance(tensor, torch.Tensor):
            self._load_plain(tensor if self.part is None else self.part.read(tensor))
        elif not isinstance(tensor, AnyStoredWeight):
            self._load_plain(tensor.read(self.part))
        elif self.load_stored is not None:
            self.load_stored(tensor)
        else:
            raise ValueError("is quantized, and only supported in full precision")

    def _load_plain(self, tensor: torch.Tensor) -> None:
        plain(tensor.nan_to_num(nan=math.nan) if self.kind is WeightKind.BOUND else tensor)
        self.load(tensor)

    @property
    def num_elements(self) -> int:
        """Numbers that are read of the tensor."""
        if self.part is None:
            return math.prod(self.shape)
        return math.prod(self.shape) // (self.shape[self.part.dim] or 1) * len(self.part)


AnyWeight: TypeAlias = torch.Tensor | FileTensor | AnyStoredWeight | UnreadWeight


class HasSlots(Protocol):
    """A part of a model that owns weights."""

    def slots(self) -> dict[str, WeightSlot]:
        """Slots by their names in the checkpoint."""


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; ValueError if a number is NaN or infinite.

    The extremes show that in one pass without a copy, and are NaN if a number is. In bfloat16 a sum takes 19 times as
    long.
    """
    is_read = tensor.device.type == "cpu" and tensor.dtype in _PLAIN_TYPES
    if is_read and tensor.numel() and not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        raise ValueError("has values that are NaN or infinite")
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; ValueError if it is no finite weight in full precision, such as the numbers of a quantized one."""
    if tensor.dtype not in _PLAIN_TYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"is stored as {kind} without the scales of a supported quantization")
    return finite(tensor)


def collect_slots(parts: Iterable[HasSlots | None]) -> dict[str, WeightSlot]:
    """The slots of all parts that are not None."""
    return {name: slot for part in parts if part is not None for name, slot in part.slots().items()}


def unread(slots: dict[str, WeightSlot]) -> dict[str, WeightSlot]:
    """Slots of tensors that the checkpoint must have and this rank does not read."""
    nothing = WeightPart(0)
    return {
        name: replace(
            slot,
            load=_drop,
            load_stored=slot.load_stored and _drop,
            load_table=slot.load_table and _drop,
            part=nothing if slot.shape else None,
            skip=skip_nothing if slot.load_stored else None,
        )
        for name, slot in slots.items()
    }


def skip_nothing() -> None:
    """For a tensor that is not read, and that no layer waits for."""


def _drop(tensor: torch.Tensor | AnyStoredWeight) -> None:
    """Keeps nothing of a tensor that belongs to another rank."""
