"""Pytest's configuration while `tools/mutate.py` runs tests on changes: the fastest tests are first.

One failed test is enough to see a change, and most are seen by a fast one. Property tests do not look for a smaller
example, and draw the same ones each time, so that a sample of changes has the same result in each run.
"""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import pytest

STATS = Path("mutmut-stats.json")
"""How long each test took without a change, by mutmut, in the folder where it runs the tests."""

hypothesis.settings.register_profile(
    "mutation",
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    database=None,
    derandomize=True,
    deadline=None,
)
hypothesis.settings.load_profile("mutation")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by the time that they took; those without one stay in front."""
    if STATS.exists():
        durations = json.loads(STATS.read_text(encoding="utf-8"))["duration_by_test"]
        items.sort(key=lambda item: durations.get(item.nodeid, 0.0))
