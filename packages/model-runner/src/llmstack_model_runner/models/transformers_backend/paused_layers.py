"""Layers of a model of transformers that are run some at a time.

The model's own `forward` is called once for each part. Layers that ran before give the outputs that they had, and
behind the last layer of the part the call is left. So all that is between layers is the model's own code, and every
layer computes what it would in one call. What comes before the layers, such as patches, is computed in each part again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _Left(BaseException):
    """Leaves `forward` behind a layer; nothing but this file catches it."""


class PausedLayers:
    """The longest list of layers of a model; used by one thread.

    Attributes:
        depth: Number of layers.
        are_paused: Whether they can be run some at a time, as `try_out` found; else a call runs as a whole.
    """

    def __init__(self, model: nn.Module) -> None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers: Sequence[Any] = [*max(lists, key=len)] if lists else []
        self.depth, self.are_paused = len(layers), False
        self._known: list[torch.Tensor] = []
        self._last: int | None = None
        self._calls: list[tuple[int, bool]] | None = None
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self._forward, index, layer.forward)

    def try_out(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a call as a whole, which also shows whether each layer runs once, in order, and gives states.

        Others are not paused.
        """
        calls: list[tuple[int, bool]] = []
        self._calls = calls
        try:
            found = call()
        finally:
            self._calls = None
        self.are_paused = bool(calls) and calls == [(index, True) for index in range(self.depth)]
        return found

    def run(self, call: Callable[[], torch.Tensor], known: Sequence[torch.Tensor], end: int) -> list[torch.Tensor]:
        """Outputs of the layers before `end`, of which some are known; none where layers are not paused."""
        if not self.are_paused:
            return []
        self._known, self._last = [*known], end - 1
        try:
            call()
        except _Left:
            return self._known
        finally:
            self._known, self._last = [], None
        raise RuntimeError("the model did not run its layers in their order")

    def finish(self, call: Callable[[], torch.Tensor], known: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of a call whose layers are known, unless they are not paused."""
        self._known = [*known]
        try:
            return call()
        finally:
            self._known = []

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if index < len(self._known):
            return self._known[index].clone()  # some models write into it
        output = forward(*args, **options)
        if self._calls is not None:
            self._calls.append((index, isinstance(output, torch.Tensor)))
        if self._last is not None:
            self._known.append(output)
            if index == self._last:
                raise _Left
            return output.clone()
        return output
