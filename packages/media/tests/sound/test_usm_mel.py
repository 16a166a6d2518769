"""Spectrograms of Gemma 4's sound equal those of transformers, for sound of any length."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from llmstack_media import processors
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.gemma4_sound import Gemma4SoundProcessor
from llmstack_media.sound.usm_mel import UsmMel

FILES = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
MODEL = {"model_type": "gemma4", "audio_config": {}}
IMAGES = {"image_processor_type": "Gemma4ImageProcessor"}


@pytest.mark.parametrize("num_samples", [161, 320, 1600, 5000, 20_813, 480_000])
def test_frames_of_the_sound_are_those_of_the_reference(num_samples: int) -> None:
    samples = (0.1 * np.random.default_rng(num_samples).standard_normal(num_samples)).astype(np.float32)
    made = Gemma4AudioFeatureExtractor()([samples], sampling_rate=16_000, return_tensors="np")
    expected = made["input_features"][0][made["input_features_mask"][0]]
    np.testing.assert_array_equal(UsmMel().compute(samples), expected)
    ours = processors({**FILES, **IMAGES}, model=MODEL).audio
    assert isinstance(ours, Gemma4SoundProcessor)
    array = ours.prepare(samples)
    layout = ours.layout(num_samples)
    assert array.shape == layout.shape
    np.testing.assert_array_equal(array.view(np.float32)[..., 0].T, expected)
    mask = made["input_features_mask"][0]
    assert layout.num_vectors == mask[::2][::2].sum() <= ours.largest().num_vectors


def test_a_checkpoint_without_an_encoder_of_sound_takes_none() -> None:
    assert processors({**FILES, **IMAGES}, model={"model_type": "gemma4", "audio_config": None}).audio is None
    with pytest.raises(ProcessorConfigError, match=r"preemphasis = 0\.97 is not supported"):
        processors({**FILES, **IMAGES, "preemphasis": 0.97}, model=MODEL)
