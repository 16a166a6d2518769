"""Transcripts of sound that still comes: drafts, and in the end a file's text."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmstack_llm.outputs.request_output import CompletionOutput
from llmstack_llm.requests import RenderedPrompt
from llmstack_llm.speech.levels import PAUSE_LEVELS, SILENCE, Cut, find_cut, has_pause, voiced_stretch
from llmstack_llm.speech.segments import Segment
from llmstack_llm.speech.served import Speech
from llmstack_llm.speech.sound import LiveSound
from llmstack_llm.speech.subtitles import text_of
from llmstack_llm.speech.transcriber import MAX_NO_SPEECH, RETRY_S, Answer, Asked, Engine, Transcriber
from llmstack_model_files import SECONDS_PER_TIMESTAMP
from llmstack_types import EngineLostError

_STEP_S: Final = 0.4
"""Seconds of new sound for which the words so far are looked at again."""
_FIRST_STEP_S: Final = 0.2
"""The same before the first word of a stretch is said, so that it comes within a second."""
_SILENCE_S: Final = 4
"""Seconds of silence behind the sound of a draft. With 2 in place of 30, tiny.en repeated itself; with 4 it did not."""
_DRAFT_TOKENS_PER_S: Final = 8
_MIN_DRAFT_TOKENS: Final = 16
_MAX_CONTEXT: Final = 48
"""Tokens of text before a draft that it follows."""
_MAX_LOSSES: Final = 8
"""Times that one request is begun again behind an engine core that died."""
_SPACELESS: Final = (("\u0e00", "\u109f"), ("\u1780", "\u17ff"), ("\u3040", "\u30ff"), ("\u3400", "\u9fff"))
"""Scripts without spaces between words: of South East Asia, kana, and Chinese characters."""
_WORD_ENDS: Final = ".,;:!?…"
"""What may follow a word. Hyphens and apostrophes may be within one."""


@dataclass(slots=True)
class _Draft:
    """The draft of a stretch that still grows.

    Attributes:
        head: The sample from which on words are looked at again. The text before it is said, and will be as it is.
        head_text: Text of the stretch before `head`, and its tokens.
        latest: Text of the latest answer, from `head` on.
        agreed: What it had in common with the one before.
        covered: The sample to which drafts went so far.
    """

    head: int
    head_text: str = ""
    head_tokens: list[int] = field(default_factory=list)
    latest: str = ""
    agreed: str = ""
    covered: int = 0

    @property
    def text(self) -> str:
        """All that is agreed."""
        return self.head_text + self.agreed

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left that another look could say."""
        return bool(self.covered) and self.agreed == self.latest

    def take(self, text: str, *, is_paused: bool) -> None:
        """Takes the text of another answer. `is_paused`: The sound ends in a pause."""
        agreed = agreed_text(self.latest, text, is_paused=is_paused)
        self.latest = text
        if len(agreed) > len(self.agreed):  # it may begin otherwise, where the first words were taken for others
            self.agreed = agreed

    def move(self, tokens: Sequence[int], text: str, num_samples: int) -> None:
        """Moves `head` behind a text that is agreed."""
        self.head += num_samples
        self.head_text += text
        self.head_tokens += tokens
        self.latest, self.agreed = self.latest[len(text) :], self.agreed[len(text) :]


class LiveTranscriber(Transcriber):
    """Live sound on its way through the engine. `deltas` runs it, once.

    The text in the end is the one that a file with the same sound has: a stretch of sound is transcribed as a file's
    once its end is known. Before that, drafts are made of what there is of it, again and again, in shorter windows.
    What two drafts after one another have in common is said.

    Attributes:
        settled: Segments of the stretches that have ended, as `Transcriber.segments` has them.
        num_covered: Samples that were listened to so far.
    """

    def __init__(self, engine: Engine, speech: Speech, live: LiveSound, asked: Asked) -> None:
        """Checks language and task; raises as `Transcriber`."""
        super().__init__(engine, speech, live, asked)
        self.settled: list[Segment] = []
        self.num_covered = 0
        self._live = live
        self._max_levels = speech.window_samples // live.level_samples
        self._draft: _Draft | None = None
        self._said = ""  # behind the text of `settled`
        self._has_begun = True  # a draft waits for room, as windows of a file that has begun do

    @property
    def text(self) -> str:
        """The text of `settled`."""
        return text_of(self.settled)

    async def deltas(self) -> AsyncIterator[str]:
        """The text bit by bit, until the sound has ended; none is taken back.

        All of them make `text`, unless the end of a stretch made the model read its beginning otherwise. `text` is
        right then, and deltas go on behind the last words that both have.

        Raises:
            InvalidRequestError, EngineDeadError, RequestFailedError: As the engine's.
        """
        self._tokenizer = await self._engine.get_tokenizer("file")
        start, least = 0, 0
        seek: int | None = None
        while True:
            is_whole, levels = self._live.has_ended, self._live.levels
            cut = find_cut(levels, start, self._max_levels, is_whole=is_whole, least=least)
            least, at, looked = cut.place, self._begin(start, seek), self._live.num_samples
            if cut.is_known:
                delta = await self._settle(start, cut.place, seek)
                start, seek, least = cut.place, None, 0
            elif at is not None and self._is_certain(at, cut):
                segments, seek = await self._timed_window(at, cut.place * self._live.level_samples)
                delta = self._say(segments)
            else:
                delta = await self._drafted(at)
                at = None
            if delta:
                yield delta
            if is_whole and start >= len(levels):
                break
            if not cut.is_known and at is None:
                step_s = _STEP_S if self._draft is not None and self._draft.text else _FIRST_STEP_S
                await self._live.wait_for_growth(looked + int(step_s * self._live.rate) - 1)
        self._count()

    def _begin(self, start: int, seek: int | None) -> int | None:
        """The first sample of the growing stretch that is not settled; None while all of it is silent."""
        if seek is not None:
            return seek
        stretch = voiced_stretch(self._live.levels, start, len(self._live.levels))
        return None if stretch is None else stretch.start * self._live.level_samples

    def _is_certain(self, at: int, cut: Cut) -> bool:
        """Whether a whole window from a sample on is in the stretch, wherever this ends."""
        return -(-at // self._live.level_samples) + self._max_levels <= cut.place - PAUSE_LEVELS

    async def _settle(self, start: int, stop: int, seek: int | None) -> str:
        """Transcribes what is left of a passage of levels, as a file's; what there is to say of it."""
        stretch, segments = voiced_stretch(self._live.levels, start, stop), list[Segment]()
        if stretch is not None:
            if self.language is None and self._speech.tokens.is_multilingual:
                begin = stretch.start * self._live.level_samples
                await self._live.wait_for_growth(begin + self._speech.window_samples - 1)
                self.language = await self._detected(stretch)
            at, end = seek or stretch.start * self._live.level_samples, self._end_of(stretch)
            while at < end:
                found, at = await self._timed_window(at, end)
                segments += found
        self._draft = None
        self.num_covered = max(self.num_covered, min(stop * self._live.level_samples, self._live.num_samples))
        return self._say(segments)

    async def _timed_window(self, at: int, end: int) -> tuple[list[Segment], int]:
        began_s = time.monotonic()
        segments, covered = await self._transcribed_window(at, end)
        self._passed_s += time.monotonic() - began_s
        self.num_covered = max(self.num_covered, covered)
        self._draft = _Draft(covered)
        return segments, covered

    async def _drafted(self, at: int | None) -> str:
        """The new text after another look at the end of the sound; `at` is where its stretch begins."""
        live = self._live
        if at is None:
            self.num_covered = live.num_samples
            return ""
        draft = self._draft = self._draft or _Draft(at)
        stop = min(live.num_samples, draft.head + self._speech.window_samples)
        covered_level, stop_level = draft.covered // live.level_samples, stop // live.level_samples
        is_quiet = max(live.levels[covered_level:stop_level], default=0.0) <= SILENCE
        if stop > draft.covered and not (draft.is_settled and is_quiet):
            await self._until_end(self._look(draft, stop))
        draft.covered = self.num_covered = stop
        return self._say((), draft.text)

    async def _until_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Does work that is of no use once the sound has ended: it stops then."""
        working = asyncio.create_task(work)
        ending = asyncio.create_task(self._live.wait_for_growth(sys.maxsize))
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def _look(self, draft: _Draft, stop: int) -> None:
        live = self._live
        is_paused = has_pause(live.levels, draft.head // live.level_samples, stop // live.level_samples)
        answer = await self._read_again(draft, stop)
        if answer is None:
            return
        draft.take(answer.text, is_paused=is_paused)
        if not answer.text.startswith(draft.agreed):
            return  # it reads the beginning otherwise
        num_chars, closed = 0, (0, 0, 0)
        for number, passage in enumerate(answer.passages, 1):
            num_chars += len(self._tokenizer.decode(passage.token_ids))
            if passage.end is not None and num_chars <= len(draft.agreed):
                closed = (number, num_chars, int(passage.end * SECONDS_PER_TIMESTAMP * live.rate))
        number, num_chars, num_samples = closed
        if num_samples and draft.head + num_samples < stop:
            tokens = [token for passage in answer.passages[:number] for token in passage.token_ids]
            draft.move(tokens, answer.text[:num_chars], num_samples)

    async def _read_again(self, draft: _Draft, stop: int) -> Answer | None:
        """The model's answer to the sound from a draft's head to a sample; None for noise, or if it repeats itself.

        A doubtful answer counts: the first words of a sentence are improbable without the next ones.
        """
        counts = self.num_prompt_tokens, self.num_output_tokens
        window = await self._speech.open(await self._live.read(draft.head, stop), self._tenant, silence_s=_SILENCE_S)
        max_tokens = _MIN_DRAFT_TOKENS + _DRAFT_TOKENS_PER_S * (stop - draft.head) // self._live.rate
        try:
            answer = await self._generated(window, 0.0, draft.head_tokens[-_MAX_CONTEXT:], max_tokens)
            is_noise = answer.is_doubtful and await self._no_speech_prob(window) > MAX_NO_SPEECH
        finally:
            self.num_prompt_tokens, self.num_output_tokens = counts  # those of drafts are no cost of the client
        return None if is_noise or answer.is_repetitive else answer

    def _say(self, segments: Sequence[Segment], draft: str = "") -> str:
        """The new part of the text of further segments, or of a draft behind all settled ones."""
        base = self.text
        self.settled += segments
        if draft:
            whole = f"{''.join(segment.text for segment in self.settled)}{draft}".strip()
            delta, _ = continued(self._said, whole[len(base) :])
            if delta:
                self._said = whole[len(base) :]
        else:  # what was said of a draft may be of the next stretch: where this one ends was not known yet
            delta, self._said = continued(self._said, self.text[len(base) :])
        return delta

    async def _run(self, prompt: RenderedPrompt, sampling: Mapping[str, object]) -> CompletionOutput:
        """Runs a window as of a file, but begins again where the engine core that had it died."""
        for _ in range(_MAX_LOSSES):
            try:
                return await super()._run(prompt, sampling)
            except EngineLostError:
                await asyncio.sleep(RETRY_S)
        return await super()._run(prompt, sampling)


def agreed_text(before: str, after: str, *, is_paused: bool) -> str:
    """The whole words with which both texts begin, in the letters of `after`: capitals are no difference.

    A word is whole where another or punctuation follows it in `after`, and also in `before` unless that ends there. The
    last word of both is whole if the sound ends in a pause.
    """
    pairs = zip(before, after)  # noqa: B905 (one may be longer)
    common = after[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0].lower() == pair[1].lower(), pairs))]
    if len(common) == len(after) == len(before) and is_paused:
        return common
    for end in range(len(common), 0, -1):
        is_whole = _ends_word(after[end : end + 1]) and (end == len(before) or _ends_word(before[end : end + 1]))
        if is_whole or (end < len(common) and _is_spaceless(common[end - 1])):
            return common[:end]
    return ""


def continued(said: str, text: str) -> tuple[str, str]:
    """The part of a text behind all that was said of it; and the said part behind the end of the text."""
    if text.startswith(said):
        return text[len(said) :], ""
    if said.startswith(text):
        return "", said[len(text) :]
    ours, theirs = said.split(), text.split()
    plain, other = ([word.strip(".,;:!?…\"'").casefold() for word in words] for words in (ours, theirs))
    blocks = difflib.SequenceMatcher(None, plain, other, autojunk=False).get_matching_blocks()
    our_end, their_end = max(((one.a + one.size, one.b + one.size) for one in blocks[:-1]), default=(0, 0))
    if our_end == len(ours) or their_end < len(theirs):
        rest = theirs[their_end:]
        return (f" {' '.join(rest)}" if rest else ""), ""
    return "", f" {' '.join(ours[our_end:])}"


def _ends_word(following: str) -> bool:
    return following.isspace() or (following != "" and following in _WORD_ENDS)


def _is_spaceless(char: str) -> bool:
    return any(first <= char <= last for first, last in _SPACELESS)
