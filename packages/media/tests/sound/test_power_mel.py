"""Spectrograms of Granite Speech, beside the functions of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from llmstack_media.sound.power_mel import PowerMel

pytest.importorskip("transformers")


@pytest.mark.parametrize("num_samples", [1600, 16_000, 21_333, 170_001])
def test_a_spectrogram_is_that_of_the_reference(num_samples: int) -> None:
    from transformers.audio_utils import mel_filter_bank, spectrogram

    random = np.random.default_rng(num_samples)
    samples = (0.3 * np.sin(np.arange(num_samples) / 7) + 0.05 * random.standard_normal(num_samples)).astype(np.float32)
    window = np.pad(np.hanning(401)[:-1], 56)
    filters = mel_filter_bank(257, 80, 0.0, 8000.0, 16_000, norm=None, mel_scale="htk")
    log = spectrogram(samples, window, 512, 160, power=2.0, mel_filters=filters, mel_floor=1e-10, log_mel="log10").T
    expected = np.maximum(log, log.max() - 8.0) / 4.0 + 1.0
    mel = PowerMel()
    found = mel.compute(samples)
    assert found.shape == (mel.num_frames(num_samples), 80) == (len(expected) // 2 * 2, 80)
    assert np.abs(found - expected[: len(found)]).max() < 1e-5
