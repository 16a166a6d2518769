"""Transcripts of whole files, in which each window is a request."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.media.processor import OpenedMedia
from llmstack_llm.outputs.request_output import CompletionOutput
from llmstack_llm.outputs.stream import GenerationStream
from llmstack_llm.pooling.outputs import PoolingRequestOutput
from llmstack_llm.requests import GenerationRequest, OnAdmitted, RenderedPrompt
from llmstack_llm.speech.levels import LEVELS_PER_S, Stretch, loud_level, num_voiced, stretches
from llmstack_llm.speech.segments import Passage, Segment, read_passages, with_words
from llmstack_llm.speech.served import DEFAULT_TASK, Speech
from llmstack_llm.speech.sound import Sound
from llmstack_llm.speech.words import Word
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_model_files import SECONDS_PER_TIMESTAMP
from llmstack_types import PoolingParams, RequestOutputKind, ServerOverloadedError

ResultT = TypeVar("ResultT")
LADDER: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_OF_BEAMS: Final = ("use_beam_search", "n", "length_penalty")
"""Fields of the first try alone: another one is drawn, and a beam search draws nothing."""
_MAX_COMPRESSION_RATIO: Final = 2.4
_MIN_LOGPROB: Final = -1.0
MAX_NO_SPEECH: Final = 0.6
_MAX_WINDOWS: Final = 8
"""Windows of one file that the engine has at once."""
_MIN_ADVANCE_S: Final = 1.0
_MIN_VOICED: Final = int(0.6 * LEVELS_PER_S)
"""Levels above a pause's that are worth another window behind the end of an answer."""
RETRY_S: Final = 0.25
_POOLED: Final = ("priority", "cache_salt", "tenant")
"""Options that a request which pools has too."""


class Engine(Protocol):
    """The engine that runs the windows; `AsyncLLM` is one."""

    async def submit(self, *requests: GenerationRequest) -> GenerationStream: ...
    async def get_tokenizer(self, param: str = ...) -> Tokenizer: ...
    def encode(
        self, prompt: RenderedPrompt, pooling_params: PoolingParams, request_id: str, *, priority: int = ...,
        cache_salt: str = ..., tenant: str = ...,
    ) -> AsyncIterator[PoolingRequestOutput]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """The options for one file.

    Attributes:
        request_id: The ids of windows begin with it.
        language: A code of the model's; None lets the first window decide.
        task: `transcribe` or `translate`.
        previous: Token ids of a text that goes before, such as one that spells names.
        is_chained: Whether each window also follows the text of the one before it, so that they run one by one.
        temperature: Of every window; None tries each of `LADDER` in turn until an answer is plausible.
        sampling: Further sampling fields.
        has_no_speech_prob: Whether the segments have it.
        has_words: Whether they have words with their times, for which each window has another request.
        options: Further fields of every `GenerationRequest`, such as tenant and priority.
        on_admitted: That of the first one.
    """

    request_id: str
    language: str | None = None
    task: str = DEFAULT_TASK
    previous: Sequence[int] = ()
    is_chained: bool = False
    temperature: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    has_no_speech_prob: bool = False
    has_words: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    on_admitted: OnAdmitted | None = None


class Answer(NamedTuple):
    """The model's answer for a window.

    Attributes:
        text: That of all passages.
        temperature: That it was drawn at.
        avg_logprob: The mean of its tokens' log-probabilities.
        compression_ratio: Of the text's bytes; one that repeats itself has a large one.
    """

    output: CompletionOutput
    passages: list[Passage]
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float

    @property
    def is_doubtful(self) -> bool:
        """Whether the model holds it for improbable itself."""
        return self.avg_logprob < _MIN_LOGPROB

    @property
    def is_repetitive(self) -> bool:
        """Whether it repeats itself."""
        return self.compression_ratio > _MAX_COMPRESSION_RATIO

    @property
    def is_implausible(self) -> bool:
        """Whether another temperature is worth a try."""
        return self.is_doubtful or self.is_repetitive


class Transcriber:
    """One file on its way through the engine. `segments` runs it, once.

    Attributes:
        language: As asked for, or detected; None for a model of English alone, and before it is known.
        num_prompt_tokens: Of all windows so far, tried again ones included.
        num_output_tokens: The same, generated.
        repeated_s: Seconds of sound that were in more than one window, since an answer did not reach its end.
    """

    def __init__(self, engine: Engine, speech: Speech, sound: Sound, asked: Asked) -> None:
        """Checks language and task.

        Raises:
            InvalidRequestError: The model does not know one of them.
        """
        speech.check(asked.language, asked.task)
        self.language = asked.language
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.repeated_s = 0.0
        self._engine = engine
        self._speech = speech
        self._sound = sound
        self._asked = asked
        self._tokenizer: Any = None
        self._num_requests = 0
        self._has_begun = False
        self._passed_s = 0.0
        self._previous: list[int] = list(asked.previous)

    async def segments(self) -> AsyncIterator[Segment]:
        """The segments in order. Windows run beside one another; leaving the iteration aborts them.

        Raises:
            InvalidRequestError, EngineDeadError, RequestFailedError: As the engine's.
            ServerOverloadedError: There is no room for the first window. Later ones wait for it.
        """
        self._tokenizer = await self._engine.get_tokenizer("file")
        max_levels = self._speech.window_samples // self._sound.level_samples
        waiting = stretches(self._sound.levels, max_levels)  # found one by one: those of hours take half a second
        following, began_s = next(waiting, None), time.monotonic()
        if following is not None and self.language is None and self._speech.tokens.is_multilingual:
            self.language = await self._detected(following)
        running: deque[asyncio.Task[list[Segment]]] = deque()
        max_running = 1 if self._asked.is_chained else _MAX_WINDOWS
        try:
            while following is not None or running:
                while following is not None and len(running) < max_running:
                    running.append(asyncio.create_task(self._transcribed(following)))
                    following = next(waiting, None)
                for segment in await running[0]:
                    yield segment
                running.popleft()
            self._passed_s = time.monotonic() - began_s
            self._count()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _count(self) -> None:
        counts = self._speech.counts
        counts.sound_s += self._sound.duration_s
        counts.passed_s += self._passed_s
        counts.repeated_s += self.repeated_s

    async def _detected(self, stretch: Stretch) -> str | None:
        start = stretch.start * self._sound.level_samples
        samples = await self._sound.read(start, start + self._speech.window_samples)
        window = await self._speech.open(samples, self._tenant)
        detection = self._speech.detection(window)
        output = await self._run(detection, self._speech.detection_sampling)
        return self._speech.read_detection(output).language

    async def _transcribed(self, stretch: Stretch) -> list[Segment]:
        """The segments of a stretch, whose windows follow one another where the answers end."""
        found, end = list[Segment](), self._end_of(stretch)
        seek = stretch.start * self._sound.level_samples
        while seek < end:
            segments, seek = await self._transcribed_window(seek, end)
            found += segments
        return found

    def _end_of(self, stretch: Stretch) -> int:
        return min(stretch.stop * self._sound.level_samples, self._sound.num_samples)

    async def _transcribed_window(self, seek: int, end: int) -> tuple[list[Segment], int]:
        """The segments of the window at a place of a stretch that ends at another, and where the next one begins."""
        stop = min(seek + self._speech.window_samples, end)
        window = await self._speech.open(await self._sound.read(seek, stop), self._tenant)
        answer, no_speech_prob = await self._answered(window)
        passages = [] if answer is None else answer.passages
        covered = self._covered(passages, seek, stop, end)
        if covered < stop and passages and passages[-1].end is None:
            passages = passages[:-1]  # it is in the next window as a whole
        self.repeated_s += (stop - covered) / self._sound.rate
        if answer is None or not passages:
            return [], covered
        made = [self._segment(one, answer, seek, stop) for one in passages]
        made = [replace(one, no_speech_prob=no_speech_prob) for one in made]
        if self._asked.has_words:
            made = with_words(made, await self._words(window, answer, stop - seek))
        if self._asked.is_chained:
            self._previous += [token for one in passages for token in one.token_ids]
        return [one for one in made if one.text.strip()], covered

    def _covered(self, passages: list[Passage], seek: int, stop: int, end: int) -> int:
        """The start of the next window: the end of this one, unless its answer ends before what is said there."""
        rate, level_samples = self._sound.rate, self._sound.level_samples
        steps = [passage.end for passage in passages if passage.end is not None]
        if not steps:
            return stop
        reached = seek + int(steps[-1] * SECONDS_PER_TIMESTAMP * rate)
        if reached - seek < _MIN_ADVANCE_S * rate or reached >= stop:
            return stop
        is_open = passages[-1].end is None
        levels = self._sound.levels
        loud = loud_level(levels[seek // level_samples : stop // level_samples])
        rest = num_voiced(levels[reached // level_samples : -(-stop // level_samples)], loud)
        is_cut = is_open and stop < end
        return reached if is_cut or rest >= _MIN_VOICED else stop

    def _segment(self, passage: Passage, answer: Answer, seek: int, stop: int) -> Segment:
        seek_s, stop_s = seek / self._sound.rate, stop / self._sound.rate
        start_s = min(seek_s + passage.start * SECONDS_PER_TIMESTAMP, stop_s)
        end_s = stop_s if passage.end is None else min(seek_s + passage.end * SECONDS_PER_TIMESTAMP, stop_s)
        logprobs = answer.output.logprobs or []
        entries = tuple(
            logprobs[place][token]
            for place, token in zip(passage.places, passage.token_ids, strict=True)
            if place < len(logprobs)
        )
        return Segment(
            start_s, end_s, seek_s, self._tokenizer.decode(passage.token_ids), passage.token_ids,
            entries, answer.temperature, answer.avg_logprob, answer.compression_ratio,
        )  # fmt: skip

    async def _answered(self, window: OpenedMedia) -> tuple[Answer | None, float | None]:
        """The answer of a window, None where nothing is said in it; and the probability of that, if it is known."""
        temperatures = LADDER if self._asked.temperature is None else (self._asked.temperature,)
        no_speech_prob = await self._no_speech_prob(window) if self._asked.has_no_speech_prob else None
        answer: Answer | None = None
        for temperature in temperatures:
            answer = await self._generated(window, temperature)
            if answer.is_doubtful:
                if no_speech_prob is None:
                    no_speech_prob = await self._no_speech_prob(window)
                if no_speech_prob > MAX_NO_SPEECH:
                    return None, no_speech_prob
            if not answer.is_implausible:
                break
        return answer, no_speech_prob

    async def _no_speech_prob(self, window: OpenedMedia) -> float:
        prompt = self._speech.detection(window)
        return self._speech.read_detection(await self._run(prompt, self._speech.detection_sampling)).no_speech_prob

    async def _generated(
        self, window: OpenedMedia, temperature: float, previous: Sequence[int] = (), max_tokens: int | None = None
    ) -> Answer:
        """An answer, behind the text before and what is given here of it; `max_tokens` limits it further."""
        language = self.language if self._speech.tokens.is_multilingual else None
        before = [*self._previous, *previous]
        prompt = self._speech.prompt(window, language=language, task=self._asked.task, previous=before)
        sampling = {"logprobs": 0, **self._asked.sampling, "temperature": temperature}
        if temperature and self._asked.temperature is None:
            sampling = {name: value for name, value in sampling.items() if name not in _OF_BEAMS}
        if max_tokens is not None:
            sampling["max_tokens"] = min(max_tokens, sampling.get("max_tokens") or max_tokens)
        output = await self._run(prompt, sampling)
        passages = read_passages(output.token_ids, self._speech.tokens)
        text = "".join(self._tokenizer.decode(passage.token_ids) for passage in passages)
        data = text.encode("utf-8", "replace")
        ratio = len(data) / len(zlib.compress(data)) if data else 0.0
        avg_logprob = (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
        return Answer(output, passages, text, temperature, avg_logprob, ratio)

    async def _words(self, window: OpenedMedia, answer: Answer, num_samples: int) -> list[Word]:
        """The words of a window's answer, by a request that follows it through the sound."""
        speech, language = self._speech, self.language if self._speech.tokens.is_multilingual else None
        prompt = speech.aligned(window, answer.output.token_ids, language=language, task=self._asked.task)
        aligned = await self._with_room(lambda request_id: self._pooled(prompt, request_id))
        self.num_prompt_tokens += len(prompt.token_ids)
        return await asyncio.to_thread(speech.words, aligned, num_samples, self._tokenizer.bytes_of, language)

    async def _pooled(self, prompt: RenderedPrompt, request_id: str) -> PoolingRequestOutput:
        options = {name: self._asked.options[name] for name in _POOLED if name in self._asked.options}
        outputs = self._engine.encode(prompt, self._speech.alignment_params, request_id, **options)
        found: list[PoolingRequestOutput] = [output async for output in outputs]
        return found[-1]

    async def _run(self, prompt: RenderedPrompt, sampling: Mapping[str, object]) -> CompletionOutput:
        """The output of one request. Once the file has begun, it waits for room."""
        given = GivenSampling({**sampling, "output_kind": RequestOutputKind.FINAL_ONLY})
        stream = await self._with_room(lambda request_id: self._submitted(prompt, given, request_id))
        self.num_prompt_tokens += len(prompt.token_ids)
        async with stream:
            whole: CompletionOutput = [output async for output in stream][-1].outputs[0]
        self.num_output_tokens += len(whole.token_ids)
        return whole

    async def _submitted(self, prompt: RenderedPrompt, given: GivenSampling, request_id: str) -> Any:
        on_admitted = self._asked.on_admitted if self._num_requests == 1 else None
        request = GenerationRequest(request_id, prompt, given, on_admitted=on_admitted, **self._asked.options)
        return await self._engine.submit(request)

    async def _with_room(self, begin: Callable[[str], Awaitable[ResultT]]) -> ResultT:
        """The result of a request with an id of its own; see `_run`."""
        while True:
            self._num_requests += 1
            try:
                result = await begin(f"{self._asked.request_id}-{self._num_requests}")
            except ServerOverloadedError:
                if not self._has_begun:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._has_begun = True
                return result

    @property
    def _tenant(self) -> str:
        return str(self._asked.options.get("tenant", ""))
