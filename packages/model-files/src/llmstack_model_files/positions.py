"""Numbers of positions that a configuration gives a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_POSITIONS = 1 << 40


def extended_positions(config: Mapping[str, Any], num_positions: int) -> int:
    """Positions of a model that has `num_positions` in its configuration, with those that YaRN's factor adds."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return num_positions
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not all(isinstance(value, int | float) and 0 < value <= _MAX_POSITIONS for value in (factor, original)):
        return num_positions
    return max(num_positions, int(float(factor or 1) * float(original or 1)))
