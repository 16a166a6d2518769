"""Log-mel spectrograms equal transformers', and windows are named by what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from llmstack_media.audio.windows import WindowFront
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.sound import read_log_mel
from llmstack_media.sound.log_mel import LogMel
from llmstack_types import InvalidRequestError

WINDOW = 480_000


def tones(num_samples: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A chord that becomes quiet, and noise."""
    seconds = np.arange(num_samples) / 16_000
    chord = sum(np.sin(2 * np.pi * hertz * seconds) for hertz in (220.0, 1330.0, 6100.0)) * np.exp(-seconds)
    noise = np.random.default_rng(num_samples).standard_normal(num_samples)
    return (0.2 * chord + 0.01 * noise).astype(np.float32)


@pytest.mark.parametrize(
    ("num_bins", "num_samples"), [(80, 0), (80, 150), (80, 30_000), (80, WINDOW), (128, 30_000), (128, 479_999)]
)
def test_features_equal_those_of_the_reference(num_bins: int, num_samples: int) -> None:
    samples = tones(num_samples)
    padded = np.pad(samples, (0, WINDOW - num_samples))
    expected = WhisperFeatureExtractor(feature_size=num_bins)._np_extract_fbank_features(padded[None], "cpu")[0]
    features = LogMel(num_bins).compute(samples)
    assert features.dtype == np.float32
    assert features.shape == expected.shape == (num_bins, 3000)
    assert np.abs(features - expected).max() < 1e-6


def test_files_of_both_generations_name_the_options() -> None:
    new = WhisperFeatureExtractor(feature_size=128).to_dict()
    assert read_log_mel(new, {}) == LogMel(128)
    assert read_log_mel({}, {"feature_extractor": new}) == LogMel(128)
    for files in ({}, {**new, "feature_extractor_type": "SeamlessM4TFeatureExtractor"}, {**new, "dither": 0.1}):
        with pytest.raises(ProcessorConfigError):
            read_log_mel(files, {})


async def test_a_window_is_computed_once_for_each_tenant() -> None:
    front = WindowFront(LogMel())
    samples = tones(16_000)
    first, again = await front.open(samples, "a"), await front.open(samples.copy(), "a")
    louder, foreign = await front.open(samples * 1.01, "a"), await front.open(samples, "b")
    assert first.digest == again.digest == foreign.digest != louder.digest
    prepared = [await one.prepare() for one in (first, again, foreign)]
    assert (front.stats.num_queries, front.stats.num_hits) == (3, 1)
    item = prepared[0].item(0, 1)
    assert (item.kind, item.num_units, item.layout) == ("audio", 1500, (3000,))
    assert item.memory is not None
    stored = np.fromfile(item.memory.path, dtype=np.float32).reshape(80, 3000)
    assert np.array_equal(stored, LogMel().compute(samples))
    for one in prepared:
        one.release()
    front.close()


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        (np.zeros(WINDOW + 1), "audio_too_long"),
        (np.full(9, np.nan), "invalid_audio"),
        (np.ones((4, 2)), "invalid_audio"),
    ],
)
async def test_sound_that_is_no_window_is_refused(samples: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await WindowFront(LogMel()).open(samples)
    assert caught.value.code == code


async def test_a_window_of_another_rate_is_converted() -> None:
    front, seconds = WindowFront(LogMel()), np.arange(48_000, dtype=np.float32) / 48_000
    window = await front.open(np.sin(2 * np.pi * 300 * seconds), rate=48_000)
    assert window.num_samples == 16_000
    assert (await front.open(np.zeros(3 * WINDOW), rate=48_000)).num_samples == WINDOW
    for num_samples, rate, code in ((3 * WINDOW + 1, 48_000, "audio_too_long"), (9, 0, "invalid_audio")):
        with pytest.raises(InvalidRequestError) as caught:
            await front.open(np.zeros(num_samples), rate=rate)
        assert caught.value.code == code
