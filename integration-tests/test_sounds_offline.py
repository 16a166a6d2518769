"""Sound in `LLM.chat` and `LLM.generate`: the tokens of transformers, every form of a sound, other rates, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sound_model
import torch
from media_chats import GREEDY, NUM_TOKENS, offline_llm
from media_chats import offline_tokens as tokens
from model_folders import model_folder
from sound_model import QUESTION, RATE, SoundReference, audio_url, parts, sound, wav

from llmstack_llm.offline.llm import LLM
from llmstack_media.sound.resample import Resampler
from llmstack_types import InvalidRequestError

llm = offline_llm
folder = model_folder(sound_model.save_sound_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    made = SoundReference(folder)
    return {seeds: made.answer(seeds, NUM_TOKENS) for seeds in ((0,), (0, 1))}


def prompt(num_sounds: int) -> str:
    sounds = "<|audio_bos|><|AUDIO|><|audio_eos|>\n" * num_sounds
    return f"<|im_start|>user\n{sounds}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def asked(given: Any, num_sounds: int = 1) -> dict[str, Any]:
    return {"prompt": prompt(num_sounds), "multi_modal_data": {"audio": given}}


def test_conversations_and_prompts_have_the_tokens_of_transformers(llm: LLM, reference: Any, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": parts(seeds)}] for seeds in reference]
    assert tokens(llm.chat(chats, GREEDY, use_tqdm=False)) == [*reference.values()]
    samples, file = sound(0), wav(sound(0))
    (tmp_path / "a.wav").write_bytes(file)
    one = [
        samples, (samples, RATE), (samples, float(RATE)), [samples], [(samples, RATE)], samples.tolist(),
        torch.from_numpy(samples), (samples * 32768).astype(np.int16), file, tmp_path / "a.wav",
        str(tmp_path / "a.wav"), audio_url(file)["audio_url"]["url"],
    ]  # fmt: skip
    expected = [*[reference[(0,)]] * len(one), reference[0, 1]]
    both = asked([(samples, RATE), sound(1)], 2)
    assert tokens(llm.generate([*map(asked, one), both], GREEDY, use_tqdm=False)) == expected


def test_samples_of_other_rates_are_those_of_the_models_rate(llm: LLM) -> None:
    for rate in (8000, 24_000, 44_100):
        samples = sound(0)[: rate // 2]
        resampler = Resampler(rate, RATE)
        moved = np.concatenate([resampler.feed(samples), resampler.finish()])
        given = llm.generate([asked((samples, rate)), asked(moved)], GREEDY, use_tqdm=False)
        assert len(given[0].prompt_token_ids or ()) == len(given[1].prompt_token_ids or ())
        assert tokens(given)[0] == tokens(given)[1]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (b"no", "unsupported_media_format"),
        (7, "invalid_type"),
        ({"a": 1}, "invalid_type"),
        (np.zeros((2, 16_000), np.float32), "invalid_audio"),
        (np.full(16_000, np.nan), "invalid_audio"),
        ((np.zeros(16_000), 16_000.5), "invalid_value"),
        ((np.zeros(16_000), float("inf")), "invalid_value"),
        ((np.zeros(16_000), 7), "invalid_audio"),
        (np.zeros(100), "audio_too_short"),
        (np.zeros(500_000), "audio_too_long"),
        ("/no/such/file", "invalid_value"),
    ],
)
def test_what_is_no_sound_is_named(llm: LLM, given: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(asked(given), GREEDY, use_tqdm=False)
    assert (caught.value.param, caught.value.code) == ("prompts[0].multi_modal_data.audio", code)


def test_other_kinds_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate({"prompt": prompt(1), "multi_modal_data": {"image": b""}}, GREEDY, use_tqdm=False)
    assert (caught.value.param, caught.value.code) == ("prompts[0].multi_modal_data.image", "unsupported_parameter")
