"""Tiny checkpoints of families that take sound in chats, in the form of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.audio_utils import mel_filter_bank
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from llmstack_media import SoundProcessor, processors
from llmstack_types import MediaItem
from model_runner_helpers.backend_picture_families import BACKEND_FAMILIES, GEMMA_4_FEATURES, in_patches_of_8
from model_runner_helpers.picture_families import (
    PLACEHOLDER,
    QWEN_FILES,
    TEXT,
    VIDEO_PLACEHOLDER,
    Picture,
    PictureFamily,
    before_language_model_alone,
    ids_of,
    of_patches,
    of_qwen_2_vl,
    prepare,
    with_bytes,
)

RATE = 16_000
WINDOW_S = 2


@dataclass(frozen=True)
class SoundFamily(PictureFamily):
    """The same for sounds.

    Attributes:
        seconds: Of sounds.
        options: Of transformers' feature extractor, when it is called.
        placeholder: The id of a sound's tokens.
    """

    seconds: tuple[float, ...] = (1.3, 0.61, 2.0)
    options: Mapping[str, Any] = field(default_factory=dict)
    placeholder: int = PLACEHOLDER

    def item(self, seed: int) -> Picture:
        ours, samples = self.ours_of_sounds(), sound(seed, self.seconds[seed % len(self.seconds)])
        layout, array = ours.layout(len(samples)), ours.prepare(samples)
        assert array.shape == layout.shape
        tokens, runs = ids_of(ours.placeholders(layout), self.placeholder)
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
        made = extractor(samples, sampling_rate=RATE, return_tensors="np", **self.options)
        found: np.ndarray[Any, Any] = made.input_features[0]
        return found


@dataclass(frozen=True)
class Gemma4Family(SoundFamily):
    """Every third item is a picture."""

    def item(self, seed: int) -> Picture:
        return prepare(self.ours(), self.sizes[0], seed) if seed % 3 == 1 else super().item(seed)

    def nested(self) -> dict[str, Any]:
        image = {key: value for key, value in self.preprocessor.items() if key not in GEMMA_4_FEATURES}
        return {"feature_extractor": GEMMA_4_FEATURES, "image_processor": image}

    def spectrogram(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        extractor = Gemma4AudioFeatureExtractor(feature_size=16)
        found: np.ndarray[Any, Any] = extractor([samples], sampling_rate=RATE, return_tensors="np").input_features[0]
        return found


@dataclass(frozen=True)
class OmniFamily(SoundFamily):
    """Every third item is a picture. Each has a token before it and one behind it, which transformers looks for."""

    def item(self, seed: int) -> Picture:
        is_picture = seed % 3 == 1
        found = prepare(self.ours(), self.sizes[0], seed) if is_picture else super().item(seed)
        before, behind = (VISION_START, VISION_END) if is_picture else (SOUND_START, SOUND_END)
        return found._replace(tokens=[before, *found.tokens, behind], item=replace(found.item, offset=1))

    def nested(self) -> dict[str, Any]:
        image = {key: value for key, value in self.preprocessor.items() if key not in _FEATURES}
        return {"feature_extractor": _FEATURES, "image_processor": image}

    def spectrogram(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        extractor = transformers.WhisperFeatureExtractor(**_FEATURES)
        found: np.ndarray[Any, Any] = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
        return found


@dataclass(frozen=True)
class GraniteFamily(SoundFamily):
    """Sounds are of one length: transformers pads those of a prompt, and its encoder attends to that."""

    def spectrogram(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """As `GraniteSpeechFeatureExtractor`, which needs a package for its transform, in torch."""
        window = torch.hann_window(400)
        spectrum = torch.stft(torch.from_numpy(samples), 512, 160, 400, window, center=True, return_complex=True)
        filters = mel_filter_bank(257, 8, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
        mel = spectrum.abs().pow(2).T @ torch.from_numpy(filters).float()
        log = mel.clip(min=1e-10).log10()
        log = torch.maximum(log, log.max() - 8.0) / 4 + 1
        return log[: len(log) // 2 * 2].reshape(-1, 16).numpy()


def sound(seed: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A few tones and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = [random.uniform(0.05, 0.3) * np.sin(2 * np.pi * random.uniform(80, 4000) * times) for _ in range(4)]
    return (sum(tones) + 0.02 * random.standard_normal(len(times))).astype(np.float32)


def _of_granite(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    return {"input_features": torch.stack(values)} if values else {}


def _one_window(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    mask = torch.zeros(len(values), values[0].shape[1], dtype=torch.long)
    for row, (num_frames,) in zip(mask, layouts, strict=True):
        row[: num_frames // 2 * 2] = 1
    return {"input_features": torch.stack(values), "feature_attention_mask": mask}


def _windows(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    length = 100 * WINDOW_S
    parts = [one.reshape(one.shape[0], -1, length).transpose(0, 1) for one in values]
    return {"input_features": torch.cat(parts)}


def _both_kinds(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    sounds = [(one, layout[0]) for one, layout in zip(values, layouts, strict=True) if len(layout) == 1]
    found = of_patches(
        [one for one in values if one.dim() > 2], [layout for layout in layouts if len(layout) == 3]
    ) if len(sounds) < len(values) else {}  # fmt: skip
    if sounds:
        mask = torch.zeros(len(sounds), sounds[0][0].shape[1], dtype=torch.long)
        for row, (_, num_frames) in zip(mask, sounds, strict=True):
            row[:num_frames] = 1
        found |= {"input_features": torch.stack([one for one, _ in sounds]), "feature_attention_mask": mask}
    return found


def _sounds_and_pictures(values: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Sounds as long as the longest, and pictures."""
    sounds = [(one, layout[0]) for one, layout in zip(values, layouts, strict=True) if len(layout) == 1]
    pictures = [(one, layout) for one, layout in zip(values, layouts, strict=True) if len(layout) == 3]
    found = in_patches_of_8(*map(list, zip(*pictures, strict=True))) if pictures else {}
    if sounds:
        length = max(len(one) for one, _ in sounds)
        features = [torch.nn.functional.pad(one, (0, 0, 0, length - len(one))) for one, _ in sounds]
        mask = torch.zeros(len(sounds), length, dtype=torch.bool)
        for row, (_, num_frames) in zip(mask, sounds, strict=True):
            row[:num_frames] = True
        found |= {"input_features": torch.stack(features), "input_features_mask": mask}
    return found


def _of_omni(name: str) -> str:
    """`model.layers.0…`, `visual.…` and `audio_tower.…`."""
    return of_qwen_2_vl(name).replace("model.audio_tower.", "audio_tower.", 1)


SOUND_START, SOUND_END, VISION_START, VISION_END = 90, 91, 92, 93
_FEATURES = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": WINDOW_S}
_GEMMA_4 = BACKEND_FAMILIES["gemma 4 with vectors of tokens"]
SOUND_FAMILIES: dict[str, PictureFamily] = {
    "gemma 4 with sound": Gemma4Family(
        "Gemma4", {**_GEMMA_4.config, "audio_token_id": VIDEO_PLACEHOLDER, "video_token_id": 9999},
        {**_GEMMA_4.preprocessor, **GEMMA_4_FEATURES}, _sounds_and_pictures, by_tokens=_GEMMA_4.by_tokens,
        placeholder=VIDEO_PLACEHOLDER,
    ),
    "granite speech": GraniteFamily(
        "GraniteSpeech",
        {"text_config": TEXT | {"model_type": "granite", "logits_scaling": 2.0, "embedding_multiplier": 0.5,
                                "residual_multiplier": 1.5, "attention_multiplier": 0.6},
         "encoder_config": {"model_type": "granite_speech_encoder", "input_dim": 16, "num_layers": 4, "hidden_dim": 24,
                            "num_heads": 3, "output_dim": 10, "context_size": 20, "max_pos_emb": 32,
                            "conv_kernel_size": 5},
         "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 24, "num_hidden_layers": 2,
                              "num_attention_heads": 3, "intermediate_size": 40, "encoder_hidden_size": 24},
         "audio_token_index": PLACEHOLDER, "has_lora_adapter": False, "tie_word_embeddings": False},
        {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "n_mels": 8}, _of_granite,
        hub_name=before_language_model_alone, seconds=(1.3,), logit_scale=0.5,
    ),
    "qwen 2 audio": SoundFamily(
        "Qwen2Audio",
        {"text_config": TEXT | {"model_type": "qwen2", "rope_theta": 1e4},
         "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 24, "encoder_layers": 3,
                          "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "num_mel_bins": 16,
                          "max_source_positions": 50 * WINDOW_S},
         "audio_token_index": PLACEHOLDER, "tie_word_embeddings": False},
        _FEATURES, _one_window, hub_name=before_language_model_alone,
    ),
    "voxtral": SoundFamily(
        "Voxtral",
        {"text_config": TEXT | {"model_type": "llama", "head_dim": 8, "rope_theta": 1e4},
         "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 24, "num_hidden_layers": 3,
                          "num_attention_heads": 3, "intermediate_size": 96, "num_mel_bins": 16,
                          "max_source_positions": 50 * WINDOW_S},
         "audio_token_id": PLACEHOLDER, "tie_word_embeddings": False},
        _FEATURES, _windows, hub_name=before_language_model_alone, seconds=(1.3, 2.7, 4.0),
        options={"truncation": False, "padding": True, "pad_to_multiple_of": RATE * WINDOW_S},
    ),
    "qwen 2.5 omni": OmniFamily(
        "Qwen2_5OmniThinker",
        {"text_config": TEXT | {"model_type": "qwen2_5_omni_text", "rope_theta": 1e4,
                                "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
         "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "d_model": 24, "encoder_layers": 3,
                          "encoder_attention_heads": 3, "encoder_ffn_dim": 40, "num_mel_bins": 16, "n_window": 25,
                          "output_dim": 32, "max_source_positions": 50 * WINDOW_S},
         "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", "depth": 3, "hidden_size": 32,
                           "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
                           "window_size": 56, "fullatt_block_indexes": [1]},
         "image_token_index": PLACEHOLDER, "audio_token_index": VIDEO_PLACEHOLDER, "video_token_index": 94,
         "audio_start_token_id": SOUND_START, "audio_end_token_id": SOUND_END,
         "vision_start_token_id": VISION_START, "tie_word_embeddings": False},
        {**QWEN_FILES, **_FEATURES}, _both_kinds, hub_name=_of_omni, sizes=((170, 90),),
        by_tokens=lambda tokens: {"attention_mask": torch.ones(1, len(tokens), dtype=torch.long)},
        placeholder=VIDEO_PLACEHOLDER,
    ),
}  # fmt: skip
