"""Files of any length: every word is in the transcript once, at its time, whatever the model leaves out of a window."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_helpers.speech_fakes import (
    ENGLISH,
    LENGTHS,
    LEVEL,
    RATE,
    TOKENS,
    WINDOW,
    FakeEngine,
    FakeSound,
    Windows,
    file_of,
)

from llmstack_llm.speech.segments import Segment
from llmstack_llm.speech.served import Speech
from llmstack_llm.speech.subtitles import srt, text_of, vtt
from llmstack_llm.speech.transcriber import Asked, Transcriber
from llmstack_model_files import SpeechTokens
from llmstack_types import InvalidRequestError


def transcriber(engine: FakeEngine, tokens: SpeechTokens = ENGLISH, **asked: Any) -> Transcriber:
    speech: Any = Speech(tokens, Windows(), RATE, WINDOW, 448)
    fake: Any = engine
    return Transcriber(fake, speech, engine.sound, Asked("t", **asked))


async def run(engine: FakeEngine, tokens: SpeechTokens = ENGLISH, **asked: Any) -> list[Segment]:
    return [segment async for segment in transcriber(engine, tokens, **asked).segments()]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, max_words=st.sampled_from([1, 2, 99]), is_open=st.booleans())
def test_every_word_is_in_the_transcript_once_and_at_its_time(
    lengths: list[tuple[int, int]], max_words: int, is_open: bool
) -> None:
    sound = file_of(lengths)
    engine = FakeEngine(sound, max_words, is_open=is_open)
    segments = asyncio.run(run(engine))
    assert [segment.token_ids for segment in segments] == [(said.word,) for said in sound.words]
    for segment, said in zip(segments, sound.words, strict=True):
        assert abs(segment.start_s * RATE - said.start) <= LEVEL
        assert abs(segment.end_s * RATE - said.stop) <= LEVEL


async def test_silence_is_never_decoded() -> None:
    engine = FakeEngine(FakeSound([], 100 * RATE))
    assert await run(engine) == []
    assert engine.requests == []


async def test_windows_are_cut_at_pauses_and_run_beside_one_another() -> None:
    sound = file_of([(25, 100)] * 120)  # 300 s, with a pause of half a second between words
    engine = FakeEngine(sound)
    assert len(await run(engine)) == 120
    assert 10 <= len(engine.requests) <= 15
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)
    one = transcriber(engine)
    [_ async for _ in one.segments()]
    assert one.repeated_s == 0
    assert one.num_output_tokens > 0


async def test_words_without_pauses_are_never_cut() -> None:
    sound = file_of([(0, 130)] * 50)
    segments = await run(FakeEngine(sound))
    assert [segment.token_ids[0] for segment in segments] == list(range(50))


async def test_an_implausible_answer_is_tried_again_up_the_ladder() -> None:
    engine = FakeEngine(file_of([(0, 100)]))
    engine.logprob = -2.0
    (segment,) = await run(engine)
    assert segment.temperature == 1.0
    temperatures = [one.sampling.values["temperature"] for one in engine.requests if "logprobs" in one.sampling.values]
    assert temperatures[:1] + temperatures[2:] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    engine.requests.clear()
    (segment,) = await run(engine, temperature=0.3)
    assert segment.temperature == 0.3
    engine.requests.clear()
    await run(engine, sampling={"use_beam_search": True, "n": 4, "length_penalty": 0.5, "seed": 3})
    tries = [one.sampling.values for one in engine.requests if "logprobs" in one.sampling.values]
    tries = [one for one in tries if "logprob_token_ids" not in one]
    assert [one.get("use_beam_search") for one in tries] == [True, *[None] * 5]
    assert [(one.get("n"), one.get("length_penalty"), one["seed"]) for one in tries[:2]] == [
        (4, 0.5, 3),
        (None, None, 3),
    ]


async def test_a_doubtful_answer_to_no_speech_is_left_out() -> None:
    engine = FakeEngine(file_of([(0, 100)]))
    engine.logprob, engine.no_speech = -2.0, 0.9
    assert await run(engine) == []


async def test_the_first_window_decides_the_language() -> None:
    engine = FakeEngine(file_of([(0, 100)]))
    one = transcriber(engine, TOKENS, has_no_speech_prob=True)
    (segment,) = [segment async for segment in one.segments()]
    assert one.language == "de"
    assert segment.no_speech_prob == pytest.approx(2.718281828**-5)
    prompts: list[Any] = [request.prompt for request in engine.requests]
    assert prompts[-1].token_ids == [9001, 9004, 9005]
    with pytest.raises(InvalidRequestError):
        transcriber(engine, TOKENS, language="xx")
    with pytest.raises(InvalidRequestError):
        transcriber(engine, ENGLISH, task="translate")


async def test_chained_windows_follow_the_text_before_them() -> None:
    sound = file_of([(40, 1000)] * 4)
    engine = FakeEngine(sound)
    await run(engine, is_chained=True, previous=[77])
    prompts: list[Any] = [request.prompt for request in engine.requests]
    assert prompts[0].token_ids == [9002, 77, 9001]
    assert prompts[-1].token_ids == [9002, 77, 0, 1, 2, 9001]


async def test_words_have_times_of_the_file_and_belong_to_their_segments() -> None:
    engine = FakeEngine(file_of([(50, 100)] * 20))
    segments = await run(engine, has_words=True, options={"tenant": "a", "priority": 2, "param": "file"})
    assert [tuple(word.text for word in one.words) for one in segments] == [(f" w{number}",) for number in range(20)]
    assert len(engine.pooled) == len(engine.requests) > 1
    request_id, options = engine.pooled[0]
    assert options == {"tenant": "a", "priority": 2}
    assert request_id not in {request.request_id for request in engine.requests}
    for one in segments:  # the n-th word of a window is its token 3n + 2, a tenth of a second each
        place = [other for other in segments if other.seek_s == one.seek_s].index(one)
        assert one.words[0].start_s == pytest.approx(one.seek_s + 0.1 * (3 * place + 2))


async def test_a_file_that_has_begun_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmstack_llm.speech.transcriber.RETRY_S", 0.0)
    engine = FakeEngine(file_of([(50, 1000)] * 4))
    engine.num_refused = 3
    assert len(await run(engine)) == 4


def segment(start_s: float, end_s: float, text: str) -> Segment:
    return Segment(start_s, end_s, 0.0, text, (), (), 0.0, -0.1, 1.0)


def test_subtitles_have_numbers_times_and_one_line_of_text() -> None:
    segments = [segment(0.0, 1.5, " And so,"), segment(3599.9996, 3661.25, " my fellow\nAmericans --> all")]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\nAnd so,\n\n2\n01:00:00,000 --> 01:01:01,250\nmy fellow Americans -> all\n\n"
    )
    assert vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nAnd so,\n\n01:00:00.000 --> ")
    assert text_of(segments) == "And so, my fellow\nAmericans --> all"
