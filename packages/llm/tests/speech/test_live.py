"""Sound that still comes: words while they are said, and in the end what a file has."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_helpers.speech_fakes import (
    ENGLISH,
    LENGTHS,
    LEVEL,
    RATE,
    WINDOW,
    FakeEngine,
    FakeSound,
    Said,
    Windows,
    file_of,
)

from llmstack_llm.speech.levels import find_cut
from llmstack_llm.speech.live import LiveTranscriber, agreed_text, continued
from llmstack_llm.speech.segments import Segment
from llmstack_llm.speech.served import Speech
from llmstack_llm.speech.subtitles import text_of
from llmstack_llm.speech.transcriber import Asked, Transcriber
from llmstack_types import EngineLostError


class FakeLiveSound(FakeSound):
    """A file of which there is more at each `grow`."""

    def __init__(self, words: Sequence[Said], num_samples: int) -> None:
        super().__init__(words, num_samples)
        self.all_levels, self.all_samples = self.levels, num_samples
        self.levels, self.num_samples, self.has_ended = array("f"), 0, False
        self.has_grown = asyncio.Event()

    def grow(self, num_samples: int) -> None:
        self.num_samples = min(self.num_samples + num_samples, self.all_samples)
        self.has_ended = self.num_samples == self.all_samples
        num_levels = len(self.all_levels) if self.has_ended else self.num_samples // LEVEL
        self.levels = self.all_levels[:num_levels]
        self.has_grown.set()

    async def add(self, data: bytes) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    async def wait_for_growth(self, num_samples: int) -> None:
        while self.num_samples <= num_samples and not self.has_ended:
            self.has_grown.clear()
            await self.has_grown.wait()


def live_transcriber(engine: FakeEngine, live: FakeLiveSound, tokens: Any = ENGLISH) -> LiveTranscriber:
    speech: Any = Speech(tokens, Windows(), RATE, WINDOW, 448)
    fake: Any = engine
    return LiveTranscriber(fake, speech, live, Asked("t"))


async def live(
    lengths: Sequence[tuple[int, int]], pieces: Sequence[int], tokens: Any = ENGLISH, **options: Any
) -> tuple[LiveTranscriber, list[str]]:
    """The transcriber of a live that grows piece by piece, and its deltas."""
    sound = file_of(lengths)
    live = FakeLiveSound(sound.words, sound.num_samples)
    transcriber, deltas = live_transcriber(FakeEngine(live, **options), live, tokens), list[str]()

    async def read() -> None:
        async for delta in transcriber.deltas():
            deltas.append(delta)

    reading = asyncio.create_task(read())
    for number in range(10**6):
        if live.has_ended:
            break
        live.grow(pieces[number % len(pieces)])
        for _ in range(30):
            await asyncio.sleep(0)
    await asyncio.wait_for(reading, 20)
    return transcriber, deltas


async def whole(lengths: Sequence[tuple[int, int]], **options: Any) -> list[Segment]:
    sound = file_of(lengths)
    speech: Any = Speech(ENGLISH, Windows(), RATE, WINDOW, 448)
    fake: Any = FakeEngine(sound, **options)
    return [segment async for segment in Transcriber(fake, speech, sound, Asked("t")).segments()]


@settings(max_examples=15, deadline=None)
@given(
    lengths=LENGTHS,
    pieces=st.lists(st.integers(40, 9 * RATE), min_size=1, max_size=5),
    max_words=st.sampled_from([1, 2, 99]),
    is_open=st.booleans(),
)
def test_the_segments_in_the_end_are_those_of_a_file(
    lengths: list[tuple[int, int]], pieces: list[int], max_words: int, is_open: bool
) -> None:
    options: dict[str, Any] = {"max_words": max_words, "is_open": is_open}
    expected = asyncio.run(whole(lengths, **options))
    transcriber, deltas = asyncio.run(live(lengths, pieces, **options))
    assert transcriber.settled == expected
    assert transcriber.text == text_of(expected)
    assert transcriber.num_covered == file_of(lengths).num_samples
    if max_words == 99 and all(length < 1500 for _, length in lengths) and not is_open:
        assert [word for word in "".join(deltas).split() if word != "w8999"] == transcriber.text.split()


async def test_words_are_said_while_the_sound_grows() -> None:
    lengths = [(25, 60)] * 10  # a word of 1.2 s, then a pause of half a second
    transcriber, deltas = await live(lengths, [200])
    assert len(deltas) > 5
    assert "".join(deltas) == transcriber.text == " ".join(f"w{number}" for number in range(10))


async def test_a_doubtful_draft_is_said_unless_it_is_one_of_noise() -> None:
    lengths = [(25, 60)] * 10
    for no_speech in (0.01, 0.9):
        live = FakeLiveSound(file_of(lengths).words, file_of(lengths).num_samples)
        engine = FakeEngine(live)
        engine.logprob, engine.no_speech = -1.5, no_speech
        transcriber = live_transcriber(engine, live)
        reading = asyncio.create_task(anext(transcriber.deltas(), None))
        for _ in range(60):
            live.grow(200 if live.num_samples < 12_000 else 0)
            for _ in range(30):
                await asyncio.sleep(0)
        if no_speech < 0.5:
            assert await asyncio.wait_for(reading, 5) == "w0"
        else:
            assert not reading.done()
            reading.cancel()


@given(lengths=LENGTHS, count=st.integers(0, 9000))
def test_a_cut_is_known_once_nothing_that_follows_moves_it(lengths: list[tuple[int, int]], count: int) -> None:
    levels = file_of(lengths).levels
    least, number, start = 0, 0, 0
    cuts = []
    while start < len(levels):
        cut = find_cut(levels[: start + number], start, 1500, is_whole=start + number >= len(levels), least=least)
        assert cut.place >= least
        least, number = cut.place, number + 1 + count
        if cut.is_known:
            cuts.append(cut.place)
            start, least, number = cut.place, 0, 0
    expected, start = [], 0
    while start < len(levels):
        start = find_cut(levels, start, 1500).place
        expected.append(start)
    assert cuts == expected


async def test_a_request_of_an_engine_core_that_died_is_begun_again() -> None:
    live = FakeLiveSound(file_of([(0, 100)]).words, 140 * LEVEL)
    engine = FakeEngine(live)
    submit, losses = engine.submit, [EngineLostError(), EngineLostError()]

    async def submit_or_lose(*requests: Any) -> Any:
        if losses:
            raise losses.pop()
        return await submit(*requests)

    engine.submit = submit_or_lose  # type: ignore[method-assign]
    transcriber = live_transcriber(engine, live)
    live.grow(140 * LEVEL)
    assert "".join([delta async for delta in transcriber.deltas()]) == "w0"


@pytest.mark.parametrize(
    ("before", "after", "is_paused", "agreed"),
    [
        ("", " And", False, ""),
        (" And so my fell", " And so my fellow Amer", False, " And so my"),
        (" And so my", " And so my", False, " And so"),
        (" And so my", " And so my", True, " And so my"),
        (" and so", " And so", True, " And so"),
        (" and sew", " And so", True, " And"),
        (" And so", " And so my", False, " And so"),
        (" And so my", " And so", False, " And"),
        (" And so...", " And so, my", False, " And so"),
        (" And so.", " And so. My", False, " And so."),
        (" And so.", " And so.", False, " And so"),
        (" don", " don't know", False, ""),
        ("你好世", "你好世界", False, "你好"),
    ],
)
def test_whole_words_of_two_drafts_agree(before: str, after: str, is_paused: bool, agreed: str) -> None:
    assert agreed_text(before, after, is_paused=is_paused) == agreed


@pytest.mark.parametrize(
    ("said", "text", "expected"),
    [
        ("And so", "And so my", (" my", "")),
        ("And so my", "And so", ("", " my")),
        ("and so, my", "And so my fellow", (" fellow", "")),
        ("And sew my", "And so my fellow", (" fellow", "")),
        ("And so", "And so", ("", "")),
        ("One", "Two three", (" Two three", "")),
    ],
)
def test_what_is_said_goes_on_behind_the_last_words_that_both_have(
    said: str, text: str, expected: tuple[str, str]
) -> None:
    assert continued(said, text) == expected
