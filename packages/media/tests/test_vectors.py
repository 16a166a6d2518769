"""Late interaction is the sum of the best products."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from llmstack_media.vectors import late_interaction


def test_each_vector_of_the_first_text_counts_with_its_best_product() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.standard_normal((70, 4)), generator.standard_normal((90, 4))
    expected = (first.astype(np.float32) @ second.astype(np.float32).T).max(1).sum()
    given = [array("f", numbers.astype(np.float32).tobytes()) for numbers in (first, second)]
    assert late_interaction(given[0], 70, given[1], 90) == pytest.approx(expected, rel=1e-6)
