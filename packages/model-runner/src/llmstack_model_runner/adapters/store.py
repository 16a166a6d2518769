"""The adapters in memory, and which of them a step has in its slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.low_rank import LowRankAdapter, Send
from llmstack_model_runner.adapters.config import AdapterError
from llmstack_model_runner.adapters.load import AdapterLimits, load_adapter
from llmstack_model_runner.layers.adaptation import AdaptedLayers
from llmstack_model_runner.models.base import CausalLM, Model
from llmstack_types import LoRAIdentity, ModelRunnerConfig

NO_ADAPTER = -1


class AdapterStore:
    """Adapters by identity. `read` may be called in any thread, everything else belongs to that of the steps.

    Each adapter in memory has a number, which rows of the input batch keep.
    """

    def __init__(
        self, model: Model, layers: AdaptedLayers, dtype: torch.dtype, device: torch.device, limits: AdapterLimits
    ) -> None:
        self._model = model
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._limits = limits
        self._identity_to_number: dict[str, int] = {}
        self._adapters: dict[int, LowRankAdapter] = {}
        self._next_number = 0
        self._slot_numbers: list[int] = []
        self._expert_numbers: set[int] = set()  # of adapters that change experts
        self._changes_experts = False  # an adapter of the step does

    def __contains__(self, identity: str) -> bool:
        return identity in self._identity_to_number

    def make_slots(self, num_slots: int, max_num_rows: int) -> None:
        """Makes room for the adapters of a step; those that were in slots before are placed again."""
        self._layers.make_slots(num_slots, max_num_rows, self._limits.max_rank, self._device)
        self._slot_numbers = [NO_ADAPTER] * num_slots

    def use_staging(self, send: Send) -> None:
        """Sends the order of each step's rows to the device without a wait of the host."""
        self._layers.send = send
        self._layers.change_all()

    @property
    def num_capturable_layers(self) -> int:
        """Layers that a captured step updates; 0 if adapters of this step change experts, for which the host waits."""
        return 0 if self._changes_experts else self._layers.num_layers - len(self._layers.expert_layers)

    def in_fixed_places(self, num_rows: int, num_adapted: int) -> AbstractContextManager[None]:
        """Inside, `num_rows` rows are computed with as many kernels as any adapters of theirs would need.

        `num_adapted`: Layers to update; with 0 no layer is.
        """
        return self._layers.in_fixed_places(num_rows if num_adapted else 0)

    def read(self, identity: str, path: str) -> LowRankAdapter:
        """Reads and checks an adapter.

        Raises:
            AdapterError: It cannot be served; the text is one sentence.
        """
        digest, place = LoRAIdentity.parse(identity).digest, (self._dtype, self._device)
        try:
            return load_adapter(Path(path), digest, self._model, self._layers, place, self._limits)
        except torch.OutOfMemoryError as error:
            raise AdapterError("The GPU has no memory for the adapter; lower --gpu-memory-utilization.") from error

    def add(self, identity: str, adapter: object) -> None:
        """Makes what `read` has returned available to requests."""
        if not isinstance(adapter, LowRankAdapter):
            raise TypeError("an adapter is what `read` returns")
        if identity not in self._identity_to_number:
            self._identity_to_number[identity] = self._next_number
            self._adapters[self._next_number] = adapter
            if any(map(adapter.changes, self._layers.expert_layers)):
                self._expert_numbers.add(self._next_number)
            self._next_number += 1

    def remove(self, identity: str) -> None:
        """Drops an adapter that no row has; unknown ones too."""
        number = self._identity_to_number.pop(identity, NO_ADAPTER)
        self._expert_numbers.discard(number)
        if self._adapters.pop(number, None) is not None and number in self._slot_numbers:
            slot = self._slot_numbers.index(number)
            self._slot_numbers[slot] = NO_ADAPTER
            self._layers.put(slot, None)

    def number_of(self, identity: str | None) -> int:
        """The number of an adapter in memory; `NO_ADAPTER` for None.

        Raises:
            KeyError: It is not in memory.
        """
        return NO_ADAPTER if identity is None else self._identity_to_number[identity]

    @torch.inference_mode()
    def begin_step(self, row_numbers: npt.NDArray[Any], num_row_tokens: npt.NDArray[Any]) -> int:
        """Places the adapters of a step's rows; how many layers are updated, 0 if no row has an adapter.

        The number tells which layers these are, since they never get fewer.

        Raises:
            ValueError: There are more than slots, which the scheduler does not let happen.
        """
        numbers = sorted(set(row_numbers.tolist()) - {NO_ADAPTER})
        self._changes_experts = not self._expert_numbers.isdisjoint(numbers)
        if not numbers:
            self._layers.begin_step(None)
            return 0
        number_to_slot = self._place(numbers)
        row_slots = np.array([number_to_slot.get(number, NO_ADAPTER) for number in row_numbers.tolist()])
        self._layers.begin_step(np.repeat(row_slots, num_row_tokens))
        return self._layers.num_changed

    def select_rows(self, tokens: torch.Tensor) -> None:
        """Says which tokens of the step the next logits are of."""
        self._layers.select(tokens)

    def _place(self, numbers: Sequence[int]) -> dict[int, int]:
        """Slots of the adapters; an adapter that has a slot keeps it."""
        held = self._slot_numbers
        if len(numbers) > len(held):
            raise ValueError(f"a step has {len(numbers)} adapters, and there are {len(held)} slots")
        free = [slot for slot, number in enumerate(held) if number not in numbers]
        for number in numbers:
            if number not in held:
                slot = free.pop(0)
                held[slot] = number
                self._layers.put(slot, self._adapters[number])
        return {number: held.index(number) for number in numbers}


def make_store(
    model: Model, layers: AdaptedLayers | None, config: ModelRunnerConfig, dtype: torch.dtype, device: torch.device
) -> AdapterStore | None:
    """The store of a model's adapters; None where they are not enabled.

    Raises:
        ValueError: The model, or the device, cannot serve adapters.
    """
    if layers is None:
        return None
    if not isinstance(model, CausalLM) or not layers.parts:
        raise ValueError(
            "--enable-lora needs a model that generates text; this one does not, or adapters cannot change it"
        )
    if device == torch.device("cuda"):  # adapters are read in threads, whose current GPU is the first
        device = torch.device("cuda", torch.cuda.current_device())
    return AdapterStore(model, layers, dtype, device, AdapterLimits(config.max_lora_rank, config.max_lora_bytes))
