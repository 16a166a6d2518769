"""What is known of a request's tokens from the length of its body: pictures are no text."""

from __future__ import annotations

import pytest

from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.request_sizes import LARGE_BYTES, RequestSizes
from llmstack_types import EngineReady, MediaSpec

PHOTO = 7_000_000


def test_a_photo_counts_like_other_photos_and_texts_as_ever():
    sizes = RequestSizes()
    sizes.set_model(takes_pictures=True)
    assert sizes.estimate(PHOTO) == sizes.estimate(None) == 1024 + 256 + 1
    for _ in range(200):
        sizes.observe(4000, 500, 0)
    sizes.observe(PHOTO, 300, 0)
    assert sizes.estimate(PHOTO) == sizes.estimate(PHOTO // 5) == 301
    for _ in range(200):
        sizes.observe(PHOTO, 800, 0)
    assert sizes.estimate(PHOTO) == pytest.approx(800, rel=0.01)
    assert sizes.estimate(4000) == pytest.approx(500, rel=0.01), "photos say nothing of texts"
    assert sizes.estimate(LARGE_BYTES) == pytest.approx(800, rel=0.01)
    for _ in range(200):
        sizes.observe(PHOTO, 100_000, 0)
    assert sizes.estimate(LARGE_BYTES) == pytest.approx(LARGE_BYTES / 8, rel=0.01), "no more than as text"


def test_a_model_of_texts_counts_long_ones_by_their_length():
    sizes = RequestSizes()
    assert sizes.estimate(PHOTO) == PHOTO // 4 + 257
    sizes.observe(PHOTO, 300, 0)
    assert sizes.estimate(PHOTO) < PHOTO // 40, "a long body changes what is known of all"


def test_the_queue_knows_from_the_engine_core_whether_there_are_pictures():
    monitor = QueueMonitor()
    long = monitor.sizes.estimate(PHOTO)
    spec = MediaSpec(8, {"image": 3}, max_num_tokens={"image": 64})
    monitor.log_engine_initialized(EngineReady(64, 16, 128, 257, "float32", "cpu", media=spec))
    assert monitor.sizes.estimate(PHOTO) == monitor.sizes.estimate(None) < long
    monitor.log_engine_initialized(EngineReady(64, 16, 128, 257, "float32", "cpu"))
    assert monitor.sizes.estimate(PHOTO) == long
