"""Rules of speech mask what transformers' processors mask, whatever was generated before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from llmstack_model_files import SpeechTokens
from llmstack_model_runner.sampling.logits_processor import AddedRow, LogitsRows
from llmstack_model_runner.sampling.speech_rules import SpeechRules
from llmstack_types import SamplingParams

END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, NO_TIMESTAMPS = range(30, 37)
FIRST, VOCAB_SIZE = NO_TIMESTAMPS + 1, NO_TIMESTAMPS + 1 + 40
SUPPRESSED, FIRST_SUPPRESSED = (3, START, TRANSLATE, TRANSCRIBE), (5, END)


def speech_tokens(*, is_multilingual: bool) -> SpeechTokens:
    return SpeechTokens(
        START, END, None, NO_TIMESTAMPS,
        {"en": ENGLISH, "de": GERMAN} if is_multilingual else {},
        {"transcribe": TRANSCRIBE, "translate": TRANSLATE} if is_multilingual else {},
        SUPPRESSED, FIRST_SUPPRESSED, max_initial_timestamp=10,
    )  # fmt: skip


def masked(logits: torch.Tensor, prompts: list[list[int]], answers: list[list[int]], *, multi: bool) -> torch.Tensor:
    """Our logits of rows in reverse order."""
    rules, count = SpeechRules(speech_tokens(is_multilingual=multi), len(prompts)), len(prompts)
    added = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        token_ids = np.array([*prompt, *answer, 0, 0], dtype=np.int32)  # places of what comes later
        added.append(AddedRow(row, SamplingParams(), len(prompt), token_ids))
    rules.update_state([], added)
    order = np.arange(count)[::-1].copy()
    found = rules.apply(logits[order], LogitsRows(order, np.array([len(answers[row]) for row in order])))
    return found[order]


def expected(logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=END, max_initial_timestamp_index=10)
    known, scores = torch.tensor([[*prompt, *answer]]), logits[None].clone()
    rules = [SuppressTokensAtBeginLogitsProcessor(FIRST_SUPPRESSED, len(prompt)),
             SuppressTokensLogitsProcessor([*SUPPRESSED, NO_TIMESTAMPS])]  # fmt: skip
    if prompt[-1] != NO_TIMESTAMPS:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))
    for rule in rules:
        scores = rule(known, scores)
    return scores[0]


def draw_answer(random: np.random.Generator) -> list[int]:
    """Text and rising timestamps, alone and in pairs."""
    answer, time = [], FIRST
    for _ in range(random.integers(0, 7)):
        time = min(time + int(random.integers(0, 9)), VOCAB_SIZE - 1)
        answer += [[int(random.integers(0, 29))], [time], [time, time]][random.integers(0, 3)]
    return answer


@pytest.mark.parametrize("multi", [True, False])
def test_masks_are_those_of_transformers(multi: bool) -> None:
    random = np.random.default_rng(multi)
    begin = [START, GERMAN, TRANSCRIBE] if multi else [START]
    prompts = [[*draw_answer(random), *begin, *[NO_TIMESTAMPS] * int(random.integers(0, 2))] for _ in range(150)]
    answers = [draw_answer(random) for _ in prompts]
    logits = torch.from_numpy(random.normal(0, 3, (len(prompts), VOCAB_SIZE)).astype(np.float32))
    logits[::3, FIRST:] += 4
    found = masked(logits, prompts, answers, multi=multi)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert torch.equal(found[row], expected(logits[row], prompt, answer)), (prompt, answer)


def test_the_tokens_that_a_prompt_lacks_come_first() -> None:
    prompts, answers = [[START], [START, ENGLISH], [START], [4, 9], [START, NO_TIMESTAMPS]], [[], [], [GERMAN], [], []]
    found = masked(torch.zeros(len(prompts), VOCAB_SIZE), prompts, answers, multi=True)
    allowed = [set(row.isfinite().nonzero().flatten().tolist()) for row in found]
    text = {*range(VOCAB_SIZE)} - {*SUPPRESSED, *FIRST_SUPPRESSED, NO_TIMESTAMPS}
    assert allowed == [{ENGLISH, GERMAN}, {TRANSCRIBE}, {TRANSCRIBE}, text, text]
