"""What is known of a request's tokens from the length of its body: pictures are no text."""

from __future__ import annotations

import pytest

from llmstack_server.state.body_tokens import LARGE_BYTES, BodyTokens
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_types import EngineReady, MediaSpec

PHOTO = 7_000_000


def with_pictures() -> BodyTokens:
    tokens = BodyTokens()
    tokens.takes_pictures = True
    return tokens


def test_a_photo_counts_like_other_photos_and_texts_as_ever():
    tokens = with_pictures()
    assert tokens.estimate(PHOTO) == tokens.estimate(None) == 1024.0
    tokens.observe(PHOTO, 300)
    assert tokens.estimate(PHOTO) == tokens.estimate(PHOTO // 5) == 300.0
    for _ in range(200):
        tokens.observe(PHOTO, 800)
        tokens.observe(4000, 500)
    assert tokens.estimate(PHOTO) == pytest.approx(800, rel=0.01)
    assert tokens.estimate(4000) == pytest.approx(500, rel=0.01), "photos say nothing of texts"
    assert tokens.estimate(LARGE_BYTES) == pytest.approx(800, rel=0.01)
    for _ in range(200):
        tokens.observe(PHOTO, 100_000)
    assert tokens.estimate(LARGE_BYTES) == pytest.approx(LARGE_BYTES / 8, rel=0.01), "no more than as text"


def test_a_model_of_texts_counts_long_ones_by_their_length():
    tokens = BodyTokens()
    tokens.observe(PHOTO, 300)
    assert tokens.estimate(PHOTO) > 10 * tokens.estimate(PHOTO // 100)
    assert BodyTokens().estimate(PHOTO) == PHOTO / 4


def test_the_queue_knows_from_the_engine_core_whether_there_are_pictures():
    monitor = QueueMonitor()
    long = monitor.estimate_tokens(PHOTO)
    spec = MediaSpec(8, {"image": 3}, max_num_tokens={"image": 64})
    monitor.log_engine_initialized(EngineReady(64, 16, 128, 257, "float32", "cpu", media=spec))
    assert monitor.estimate_tokens(PHOTO) == monitor.estimate_tokens(None) < long
    monitor.log_engine_initialized(EngineReady(64, 16, 128, 257, "float32", "cpu"))
    assert monitor.estimate_tokens(PHOTO) == long
