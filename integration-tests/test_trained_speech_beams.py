"""Beams of trained Whisper models on real speech are those of transformers, with and without times."""

from __future__ import annotations

from typing import Any

import pytest
from trained_speech import MAX_TOKENS, RATE, TrainedReference, folder_of, windows

from llmstack_llm import LLM, SamplingParams

WIDTH = 5
BEAMS = SamplingParams(n=WIDTH, use_beam_search=True, temperature=0, max_tokens=MAX_TOKENS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_the_best_of_five_beams_is_that_of_transformers(name: str) -> None:
    folder, clips = folder_of(name), windows()
    reference = TrainedReference(folder)
    is_multilingual = reference.model.generation_config.is_multilingual
    with LLM(folder, dtype="float32", max_num_seqs=16) as llm:
        speech = llm.llm_engine.input_processor.media.speech
        assert speech is not None
        asked: list[dict[str, Any]] = []
        expected = []
        for clip in clips:
            for has_times in (False, True):
                prompt = speech.start_ids("en" if is_multilingual else None, timestamps=has_times)
                asked.append({"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip.samples, RATE)}})
                expected.append(reference.answer(clip, prompt, has_times=has_times, num_beams=WIDTH))
        outputs = llm.generate(asked, BEAMS, use_tqdm=False)
        for output, tokens in zip(outputs, expected, strict=True):
            assert len({tuple(one.token_ids) for one in output.outputs}) == WIDTH
            assert [token for token in output.outputs[0].token_ids if token != speech.tokens.end] == tokens
