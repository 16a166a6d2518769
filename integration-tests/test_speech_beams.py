"""Beams of Whisper are those of transformers under the rules of its decoder, and share one encoded window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_folders import model_folder
from speech_model import (
    ENGLISH,
    GERMAN,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    SpeechReference,
    save_speech_model,
    sound,
    speech_prompt,
)

from llmstack_llm import LLM, BeamSearchParams
from llmstack_types import SamplingParams, SchedulerOutput

NUM_TOKENS = 14
PLAIN, TIMED = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS], [START, GERMAN, TRANSLATE]
LONG = [PREVIOUS, *range(20, 35), *TIMED]
CASES = [(0, PLAIN), (1, TIMED), (2, LONG), (0, TIMED)]
SEARCHES: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (5, {"length_penalty": 2.0, "early_stopping": True}),
    (2, {"length_penalty": 0.0, "early_stopping": "never"}),
]
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"max_num_batched_tokens": 8, "block_size": 8, "max_num_seqs": 4, "async_scheduling": True},
    "one item at a time": {"encoder_cache_tokens": 100, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "preempted": {"num_kv_blocks": 16, "block_size": 4, "max_model_len": 52},
}
Beams = list[tuple[list[int], float]]


folder = model_folder(save_speech_model)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Beams]]:
    reference = SpeechReference(folder)
    found = [
        [reference.beams(sound(seed), token_ids, NUM_TOKENS, width, **options) for seed, token_ids in CASES]
        for width, options in SEARCHES
    ]
    best = {tuple(beams[0][0]) for beams in found[0]}
    assert len(best) == len(CASES)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name.startswith("two") else ()) for name in ENGINES]
)
def test_beams_and_scores_are_those_of_transformers(folder: Path, expected: list[list[Beams]], name: str) -> None:
    asked = [speech_prompt(sound(seed), token_ids) for seed, token_ids in CASES]
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **ENGINES[name]) as llm:
        for (width, options), wanted in zip(SEARCHES, expected, strict=True):
            params = SamplingParams(
                n=width, use_beam_search=True, temperature=0, max_tokens=NUM_TOKENS, logprobs=0, **options
            )
            outputs = llm.generate(asked, params, use_tqdm=False)
            for output, beams in zip(outputs, wanted, strict=True):
                assert [list(one.token_ids) for one in output.outputs] == [tokens for tokens, _ in beams]
                scores = [
                    (one.cumulative_logprob or 0.0) / len(one.token_ids) ** options.get("length_penalty", 1.0)
                    for one in output.outputs
                ]
                assert scores == pytest.approx([score for _, score in beams], abs=1e-4)


def test_the_beams_of_all_searches_share_one_encoded_window(folder: Path, expected: list[list[Beams]]) -> None:
    encoded: list[int] = []

    class Listener:
        def on_scheduled(self, scheduled: SchedulerOutput) -> None:
            encoded.extend(work.media_id for work in scheduled.encoder_work if not work.first_layer)

    asked = [speech_prompt(sound(seed), token_ids) for seed, token_ids in CASES if seed == 0]
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, event_hooks=[Listener()]) as llm:
        outputs = llm.beam_search(asked, BeamSearchParams(4, NUM_TOKENS))
    for output, beams, prompt in zip(outputs, expected[0][::3], (PLAIN, TIMED), strict=True):
        assert [one.tokens[len(prompt) :] for one in output.sequences] == [tokens for tokens, _ in beams]
    assert len(encoded) == 1


def test_a_search_may_find_the_language_too_and_only_what_the_rules_allow(folder: Path) -> None:
    params = SamplingParams(n=4, use_beam_search=True, temperature=0, max_tokens=NUM_TOKENS)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True) as llm:
        (output,) = llm.generate(speech_prompt(sound(0), [START]), params, use_tqdm=False)
    for one in output.outputs:
        assert one.token_ids[0] in (ENGLISH, GERMAN)
        assert one.token_ids[1] == TRANSCRIBE
        assert one.token_ids[2] > NO_TIMESTAMPS
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
