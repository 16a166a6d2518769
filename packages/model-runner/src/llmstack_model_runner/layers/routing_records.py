"""Records of which experts computed which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from llmstack_model_runner.layers.experts import Experts


@contextmanager
def recorded_routing() -> Iterator[Mapping[str, list[torch.Tensor]]]:
    """Layer to the ids of the chosen experts, [num_tokens, num_choices] for each step of this process within the block.

    Layers and steps have the order in which they were computed. One block at a time.
    """
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str, expert_ids: torch.Tensor) -> None:
        found.setdefault(name, []).append(expert_ids.cpu())

    Experts.on_choice = note
    try:
        yield found
    finally:
        Experts.on_choice = None
