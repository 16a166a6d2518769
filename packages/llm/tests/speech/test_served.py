"""Prompts of windows of sound, and what the start of one tells."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from llmstack_llm.media.processor import OpenedMedia
from llmstack_llm.outputs.request_output import CompletionOutput, Logprob
from llmstack_llm.speech.served import Speech, WindowOpener
from llmstack_model_files import SpeechTokens
from llmstack_types import InvalidRequestError

ENGLISH = SpeechTokens(start=90, end=80, previous=85, no_timestamps=99, languages={}, tasks={})
MULTILINGUAL = SpeechTokens(
    start=90, end=80, previous=85, no_timestamps=99,
    languages={"en": 91, "de": 92}, tasks={"transcribe": 95, "translate": 96},
)  # fmt: skip
WINDOW = cast("OpenedMedia", object())


def speech(tokens: SpeechTokens) -> Speech:
    return Speech(tokens, cast("WindowOpener", None), 16_000, 480_000, 16)


@pytest.mark.parametrize(
    ("tokens", "asked", "token_ids"),
    [
        (ENGLISH, {}, [90]),
        (ENGLISH, {"language": "en", "timestamps": False}, [90, 99]),
        (MULTILINGUAL, {}, [90]),
        (MULTILINGUAL, {"language": "de"}, [90, 92, 95]),
        (MULTILINGUAL, {"language": "de", "task": "translate", "timestamps": False}, [90, 92, 96, 99]),
        (MULTILINGUAL, {"language": "en", "previous": [1, 2]}, [85, 1, 2, 90, 91, 95]),
        (ENGLISH, {"previous": range(20)}, [85, *range(13, 20), 90]),
    ],
)
def test_a_prompt_has_the_tokens_that_steer_the_model(tokens: Any, asked: Any, token_ids: list[int]) -> None:
    prompt = speech(tokens).prompt(WINDOW, **asked)
    assert prompt.token_ids == token_ids
    (placed,) = prompt.media
    assert (placed.opened, placed.kind, placed.offset, placed.num_tokens) == (WINDOW, "audio", 0, 1)


@pytest.mark.parametrize(
    ("tokens", "asked", "param"),
    [
        (ENGLISH, {"language": "de"}, "language"), (ENGLISH, {"task": "translate"}, "language"),
        (MULTILINGUAL, {"language": "xx"}, "language"), (MULTILINGUAL, {"language": "en", "task": "sing"}, "task"),
        (MULTILINGUAL, {"timestamps": False}, "language"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do_is_refused(tokens: Any, asked: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        speech(tokens).prompt(WINDOW, **asked)
    assert caught.value.param == param


def test_a_detection_ranks_languages_and_tells_silence() -> None:
    ours = speech(MULTILINGUAL)
    assert ours.detection(WINDOW).token_ids == [90]
    assert ours.detection_sampling["logprob_token_ids"] == [98, 91, 92]
    probabilities = {98: 0.1, 91: 0.2, 92: 0.6}
    logprobs: Any = [{token: Logprob(math.log(value)) for token, value in probabilities.items()}]
    found = ours.read_detection(CompletionOutput(0, "", [92], None, logprobs))
    assert found.no_speech_prob == pytest.approx(0.1)
    assert found.languages == pytest.approx({"de": 0.75, "en": 0.25})
    assert found.language == "de"
    assert speech(ENGLISH).read_detection(CompletionOutput(0, "", [92], None, logprobs)).language is None
