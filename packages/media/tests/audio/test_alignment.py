"""Dynamic time warping finds transformers' path, and each token its beginning."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from llmstack_media.audio.alignment import token_starts, warp


@pytest.mark.parametrize("seed", range(12))
def test_the_path_is_that_of_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = random.normal(size=random.integers(1, 30, 2))
    costs = costs.round() if seed % 2 else costs  # with ties
    rows, columns = _dynamic_time_warping(costs)
    assert warp(costs) == list(zip(rows.tolist(), columns.tolist(), strict=True))


def test_tokens_begin_where_their_heads_look() -> None:
    weights = np.random.default_rng(0).uniform(0, 0.1, (4, 2, 50)).astype(np.float32)
    for token, state in enumerate((3, 12, 20, 31)):
        weights[token, :, state : state + 8] += 1
    starts = token_starts(weights, 40)
    assert starts[0] == 0
    assert np.abs(np.array(starts[1:]) - [12, 20, 31]).max() <= 3
    assert token_starts(weights[:0], 40) == []
    assert token_starts(weights, 0) == [0] * 4
