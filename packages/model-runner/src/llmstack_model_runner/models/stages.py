"""Weights that one pipeline stage reads."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.layers.weight_slot import HasSlots, WeightSlot, collect_slots, unread


def stage_slots(
    own: Sharding,
    before: Sequence[HasSlots | None],
    layers: Sequence[HasSlots],
    behind: Sequence[HasSlots | None],
    *,
    is_tied: bool,
) -> dict[str, WeightSlot]:
    """Slots of the whole model, so that every rank checks the whole checkpoint. Slots of other stages read nothing.

    A tensor that several layers share is read if this stage has one of these layers.

    Args:
        own: The stage.
        before: Parts before the first layer, which the first stage has; the first of them is the embedding.
        layers: All layers of the model.
        behind: Parts behind the last layer, which the last stage has.
        is_tied: Whether the output head shares the embedding, so that the last stage has it too.
    """
    numbers = own.layers(len(layers))
    slots: dict[str, WeightSlot] = {}
    for index, part in enumerate(before):
        found = collect_slots([part])
        is_own = own.is_first_stage or (is_tied and index == 0 and own.is_last_stage)
        slots |= found if is_own else unread(found)
    slots |= unread(collect_slots(layer for number, layer in enumerate(layers) if number not in numbers))
    slots |= collect_slots(layers[number] for number in numbers)
    found = collect_slots(behind)
    return slots | (found if own.is_last_stage else unread(found))
