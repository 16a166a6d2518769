"""Whisper with trained weights, where they are: the text of real speech, as transformers has it.

`LLMSTACK_SPEECH` names a folder with models (`whisper-tiny.en`, `whisper-base`) in the form of transformers, and with
`speech/jfk.wav`, eleven seconds at 16 kHz.
"""

from __future__ import annotations

import os
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

from llmstack_llm.offline.llm import LLM
from llmstack_types import SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
FOLDER = Path(os.environ.get("LLMSTACK_SPEECH", "speech-models"))
MODELS = ("whisper-tiny.en", "whisper-base")
GREEDY = SamplingParams(temperature=0, max_tokens=100)
SENTENCE = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"


def plain(text: str) -> str:
    return " ".join(re.sub(r"[^a-z ]", " ", text.lower()).split())


@pytest.fixture(scope="module")
def samples() -> Any:
    path = FOLDER / "speech" / "jfk.wav"
    if not path.is_file():
        pytest.skip(f"needs {path}: set LLMSTACK_SPEECH")
    with wave.open(str(path)) as file:
        assert file.getframerate() == 16_000
        return np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)


def folder_of(name: str) -> str:
    if not (FOLDER / name / "config.json").is_file():
        pytest.skip(f"needs {FOLDER / name}: set LLMSTACK_SPEECH")
    return str(FOLDER / name)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_times_of_words_are_those_of_transformers(name: str, samples: Any) -> None:
    folder = folder_of(name)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    processor = AutoProcessor.from_pretrained(folder)
    floats = samples.astype(np.float32) / 32768
    features = processor(floats, sampling_rate=16_000, return_tensors="pt").input_features
    with LLM(folder, dtype="float32") as llm:
        speech = llm.llm_engine.input_processor.media.speech
        assert speech is not None
        language = "en" if speech.tokens.is_multilingual else None
        asked = {"language": "en", "task": "transcribe"} if language else {}
        common = {"do_sample": False, "num_beams": 1, "max_new_tokens": 100, "return_dict_in_generate": True, **asked}
        for timestamps in (False, True):
            found = model.eval().generate(
                features, return_timestamps=timestamps, return_token_timestamps=timestamps, **common,
                **({"num_frames": len(samples) // 160} if timestamps else {}),
            )  # fmt: skip
            expected = found["sequences"][0].tolist()
            prompt = speech.start_ids(language, timestamps=timestamps)
            data = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (samples, 16_000)}}
            (output,) = llm.generate(data, GREEDY, use_tqdm=False)
            answer = [token for token in output.outputs[0].token_ids if token != speech.tokens.end]
            kept = [token for token in expected if token != speech.tokens.end]
            assert kept[len(prompt) if kept[: len(prompt)] == prompt else 0 :] == answer
        times = dict(zip(expected, found["token_timestamps"][0].tolist(), strict=True))
        data["prompt_token_ids"] = [*prompt, *answer]
        (aligned,) = llm.encode(data, speech.alignment_params, use_tqdm=False)
        tokenizer = llm.llm_engine.tokenizer
        assert tokenizer is not None
        words = speech.words(aligned, len(samples), tokenizer.bytes_of, "en")
    assert plain("".join(word.text for word in words)) == SENTENCE
    once = [word for word in words if expected.count(word.token_ids[0]) == 1]
    assert len(once) > 5
    assert max(abs(times[word.token_ids[0]] - word.start_s) for word in once) < 0.1


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}])
def test_rounded_weights_say_the_same(options: Any, samples: Any) -> None:
    with LLM(folder_of("whisper-base"), **options) as llm:
        data = {"prompt": "<|startoftranscript|>", "multi_modal_data": {"audio": (samples, 16_000)}}
        (output,) = llm.generate(data, GREEDY, use_tqdm=False)
        assert plain(output.outputs[0].text) == SENTENCE
