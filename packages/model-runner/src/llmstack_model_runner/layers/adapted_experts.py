"""Products of experts whose outputs LoRA adapters change.

Each expert of this rank has a layer of the adapters for each of its two products. peft knows the matrices of all
experts as one parameter (`target_parameters`), and older checkpoints each by itself: both change the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmstack_kernels.low_rank import ExpertRows, add_low_rank_
from llmstack_model_runner.layers.adaptation import AdaptedLayers, AdaptedPart, adapted_layers


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix that every expert has.

    Attributes:
        name: Its name in a checkpoint.
        sizes: Inputs and outputs of the whole matrix.
        is_stacked: The matrices of all experts are one parameter of this name; otherwise each is a layer.
        inputs: The inputs that this rank has; None for all.
        outputs: From the rows of a whole matrix to those of this rank.
        first_output: The product's output that the matrix begins with.
    """

    name: str
    sizes: tuple[int, int]
    is_stacked: bool
    inputs: range | None = None
    outputs: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    first_output: int = 0


class ExpertUpdates:
    """The updates of a step in a layer of experts."""

    def __init__(self, rows: ExpertRows, first_layers: Sequence[int]) -> None:
        self._rows = rows
        self._first_layers = first_layers

    def add(self, outputs: torch.Tensor, x: torch.Tensor, product: int) -> torch.Tensor:
        """`outputs` [num_rows, out_features] with the updates, in place.

        `x`: The product's inputs, of each row or of each token.
        """
        num_choices = outputs.shape[0] // x.shape[0]
        inputs = x if num_choices == 1 else x.repeat_interleave(num_choices, dim=0)
        add_low_rank_(outputs, inputs, self._rows, self._first_layers[product])
        return outputs


class AdaptedExperts:
    """Registers a layer of experts with the adapters of its context, if there are any, and finds a step's updates."""

    def __init__(
        self,
        name: str,
        experts: range,
        num_experts: int,
        products: Sequence[Sequence[ExpertMatrix]],
        is_loaded: Callable[[], bool],
    ) -> None:
        """`experts`: Those of this rank. `products`: The matrices of each; those of a product share its outputs."""
        self._layers = layers = adapted_layers()
        self._runs: list[range] = []
        if layers is not None:
            self._runs = [_register(layers, name, experts, num_experts, product, is_loaded) for product in products]

    @property
    def is_enabled(self) -> bool:
        """Whether adapters may change the experts."""
        return self._layers is not None

    def updates(self, places: torch.Tensor, tokens: torch.Tensor | None = None) -> ExpertUpdates | None:
        """The updates of the rows; None if no adapter of the step changes them.

        `places`: Places of the experts among this rank's: [num_tokens, num_choices].
        `tokens`: Which tokens of the step the rows belong to; None for all tokens in order.
        """
        if self._layers is None:
            return None
        rows = self._layers.rows_of_experts(self._runs, places, tokens)
        return None if rows is None else ExpertUpdates(rows, [run.start for run in self._runs])


def _register(
    layers: AdaptedLayers,
    name: str,
    experts: range,
    num_experts: int,
    matrices: Sequence[ExpertMatrix],
    is_loaded: Callable[[], bool],
) -> range:
    """The numbers of the layers of a product."""
    first = layers.num_layers
    stacks: dict[str, list[AdaptedPart]] = {matrix.name: [] for matrix in matrices if matrix.is_stacked}
    for expert in range(num_experts):
        is_own = expert in experts
        singles: list[AdaptedPart] = []
        for matrix in matrices:
            part = AdaptedPart(
                f"{name}.{expert}.{matrix.name}",
                layers.num_layers,
                *matrix.sizes,
                matrix.first_output,
                matrix.inputs,
                matrix.outputs,
                is_loaded if is_own else lambda: False,
            )
            (stacks[matrix.name] if matrix.is_stacked else singles).append(part)
        layers.add_layer(singles, is_counted=is_own)
    layers.stacks.setdefault(name, {}).update(stacks)
    run = range(first, layers.num_layers)
    layers.expert_layers.update(run)
    return run
