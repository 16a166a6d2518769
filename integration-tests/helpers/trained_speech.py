"""Trained Whisper models and sound files where they are, and what transformers makes of them.

`LLMSTACK_SPEECH` names a folder with models (`whisper-tiny.en`, `whisper-base`) in the form of transformers, with
`speech` (`jfk.wav`, `two_cities.wav`), and with `clips`, in which each language has a folder of short sound files.
`make test-speech` fetches all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

from llmstack_media.sound.samples import sound_samples

FOLDER = Path(os.environ.get("LLMSTACK_SPEECH", "speech-models"))
RATE = 16_000
WINDOW = 30 * RATE
MAX_TOKENS = 160


class Clip(NamedTuple):
    """A window of a sound file, at 16 kHz."""

    name: str
    language: str
    samples: Any


def folder_of(name: str) -> str:
    """The folder of a model; skips where it is not there."""
    if not (FOLDER / name / "config.json").is_file():
        pytest.skip(f"needs {FOLDER / name}: set LLMSTACK_SPEECH")
    return str(FOLDER / name)


def file_of(name: str) -> Any:
    """All samples of a file of `speech`, float32; skips where it is not there."""
    path = FOLDER / "speech" / name
    if not path.is_file():
        pytest.skip(f"needs {path}: set LLMSTACK_SPEECH")
    return samples_of(path)


def samples_of(path: Path) -> Any:
    with path.open("rb") as file:
        return np.concatenate(list(sound_samples(file, RATE, 3600.0)))


def windows() -> list[Clip]:
    """Windows of `speech`."""
    found = []
    for name in ("jfk.wav", "two_cities.wav"):
        samples = file_of(name)
        found += [Clip(f"{name} from {start // RATE} s", "en", samples[start : start + WINDOW])
                  for start in range(0, len(samples), WINDOW)]  # fmt: skip
    return found


def clips(*languages: str) -> list[Clip]:
    """Windows of `speech`, and the sound files of these languages; of all languages where none is named."""
    found = windows()
    paths = sorted((FOLDER / "clips").glob("*/*.wav"))
    if not paths:
        pytest.skip(f"needs {FOLDER / 'clips'}: set LLMSTACK_SPEECH")
    chosen = [path for path in paths if not languages or path.parent.name in languages]
    return found + [Clip(f"{path.parent.name}/{path.name}", path.parent.name, samples_of(path)) for path in chosen]


class TrainedReference:
    """transformers in float32.

    Its `generate` with times runs the model again on what is left of a window where an answer ends before that, and
    joins the answers. Here that is the work of `Transcriber`, for files of any length. So its first pass is compared.
    """

    def __init__(self, folder: str, change: Callable[[Any], None] | None = None) -> None:
        """`change`: Of the model, such as one that rounds its weights."""
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, **options).eval()
        if change is not None:
            change(self.model)
        self._processor = AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def language(self, clip: Clip) -> int:
        """The token of the most likely language."""
        return int(self.model.detect_language(self._features(clip))[0])

    def _features(self, clip: Clip) -> torch.Tensor:
        found: torch.Tensor = self._processor(clip.samples, sampling_rate=RATE, return_tensors="pt").input_features
        return found

    @torch.no_grad()
    def answer(self, clip: Clip, prompt: list[int], *, has_times: bool, **options: Any) -> list[int]:
        """Token ids behind the prompt, without the end."""
        is_multilingual = self.model.generation_config.is_multilingual
        asked = {"language": clip.language, "task": "transcribe"} if is_multilingual else {}
        found = self.model.generate(
            self._features(clip), do_sample=False, max_new_tokens=MAX_TOKENS, return_timestamps=has_times,
            force_unique_generate_call=True, **asked, **{"num_beams": 1, **options},
        )[0].tolist()  # fmt: skip
        kept = [token for token in found if token != self.model.generation_config.eos_token_id]
        return kept[len(prompt) :] if kept[: len(prompt)] == prompt else kept
