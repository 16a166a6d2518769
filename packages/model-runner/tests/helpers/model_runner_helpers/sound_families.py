"""Tiny checkpoints of families that take sound in chats, in the form of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from llmstack_media import SoundProcessor, processors
from llmstack_types import MediaItem
from model_runner_helpers.picture_families import (
    PLACEHOLDER,
    TEXT,
    Picture,
    PictureFamily,
    before_language_model_alone,
    ids_of,
    with_bytes,
)

RATE = 16_000
WINDOW_S = 2


@dataclass(frozen=True)
class SoundFamily(PictureFamily):
    """The same for sounds.

    Attributes:
        seconds: Of sounds.
    """

    seconds: tuple[float, ...] = (1.3, 0.61, 2.0)

    def item(self, seed: int) -> Picture:
        ours, samples = self.ours_of_sounds(), sound(seed, self.seconds[seed % len(self.seconds)])
        layout, array = ours.layout(len(samples)), ours.prepare(samples)
        assert array.shape == layout.shape
        tokens, runs = ids_of(ours.placeholders(layout))
        item = MediaItem(b"", "audio", 0, len(tokens), tuple(runs), layout.grid, layout.num_units)
        return Picture(tokens, with_bytes(item, array.tobytes()), torch.from_numpy(self.spectrogram(samples)))

    def nested(self) -> dict[str, Any]:
        return {**self.processor, "feature_extractor": self.preprocessor}

    def ours_of_sounds(self) -> SoundProcessor:
        model_type = getattr(transformers, self.name).config_class.model_type
        found = processors(self.preprocessor, self.processor, model={"model_type": model_type, **self.config}).audio
        assert found is not None
        return found

    def spectrogram(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What transformers reads of one sound."""
        extractor = transformers.WhisperFeatureExtractor(**self.preprocessor)
        found: np.ndarray[Any, Any] = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
        return found


def sound(seed: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A few tones and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [random.uniform(0.05, 0.3) * np.sin(2 * np.pi * random.uniform(80, 4000) * times) for _ in range(4)]
    return (sum(tones) + 0.02 * random.standard_normal(len(times))).astype(np.float32)


def _one_window(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    mask = torch.zeros(len(values), values[0].shape[1], dtype=torch.long)
    for row, (num_frames,) in zip(mask, layouts, strict=True):
        row[: num_frames // 2 * 2] = 1
    return {"input_features": torch.stack(values), "feature_attention_mask": mask}


_FEATURES = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": WINDOW_S}
SOUND_FAMILIES: dict[str, PictureFamily] = {
    "qwen 2 audio": SoundFamily(
        "Qwen2Audio",
        {"text_config": TEXT | {"model_type": "qwen2", "rope_theta": 1e4},
         "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 24, "encoder_layers": 3,
                          "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "num_mel_bins": 16,
                          "max_source_positions": 50 * WINDOW_S},
         "audio_token_index": PLACEHOLDER, "tie_word_embeddings": False},
        _FEATURES, _one_window, hub_name=before_language_model_alone,
    ),
}  # fmt: skip
