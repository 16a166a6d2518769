"""Interface of a model that transcribes: windows, prompts, languages.

A door cuts sound into windows, and has one request for each:

    speech = engine.speech                              # None where the model does not transcribe
    window = await speech.open(samples, tenant)         # float32 [n], n at most `speech.window_samples`
    asked = GenerationRequest(
        request_id, speech.detection(window), GivenSampling(speech.detection_sampling), tenant=tenant
    )
    start = speech.read_detection(output.outputs[0])    # of the one output: languages, and how likely silence is
    prompt = speech.prompt(window, language=start.language, timestamps=True, previous=previous_token_ids)
    request = GenerationRequest(request_id, prompt, GivenSampling({"temperature": 0.0}), tenant=tenant)

Words have times from a second request, which pools:

    aligned = await engine.encode(speech.aligned(window, answer.token_ids, language="en"), speech.alignment_params, id)
    words = speech.words(aligned, len(samples), tokenizer.bytes_of, "en")

A window is encoded once, whatever is asked of it: requests with the same samples of one tenant share that. Both
requests may be submitted at once. Token ids of an answer from `tokens.first_timestamp` on are times, in steps of
`SECONDS_PER_TIMESTAMP`; the text is that of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from llmstack_llm import request_errors
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.media.processor import MediaStats, OpenedMedia
from llmstack_llm.media.served import make_fetcher
from llmstack_llm.outputs.request_output import CompletionOutput
from llmstack_llm.pooling.outputs import PoolingRequestOutput
from llmstack_llm.requests import RenderedPrompt
from llmstack_llm.speech.sound import LiveSound, Sound
from llmstack_llm.speech.words import TimedToken, Word, words_of
from llmstack_types import EngineStartError, PoolingParams, PoolingTask
from llmstack_types.lifecycle import AsyncClosing

if TYPE_CHECKING:
    from llmstack_model_files import SpeechTokens

DEFAULT_TASK = "transcribe"
Samples = Any
"""An array of float32 [num_samples], of one channel, from -1 to 1. This package does not import numpy."""


class WindowOpener(Protocol):
    """Windows of sound, as `llmstack_media` prepares them."""

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far."""
        ...

    def token_starts(self, weights: memoryview, num_tokens: int, num_samples: int) -> list[float]:
        """When each of some tokens begins, in seconds of the window, from their weights under `alignment`."""
        ...

    async def open(
        self, samples: Samples, tenant: str = "", rate: int | None = None, silence_s: int | None = None
    ) -> OpenedMedia:
        """A window of sound, whose samples are at the model's rate, or at `rate` in Hz.

        `silence_s`: Seconds of silence behind it at least; None fills a whole window.

        Raises:
            InvalidRequestError: It is longer than a window, not finite, or of a rate that no sound has.
        """
        ...

    def close(self) -> None:
        """Frees the memory of all windows."""
        ...


@dataclass(slots=True)
class SpeechCounts:
    """Seconds of sound transcribed since the start.

    Attributes:
        sound_s: Of files that have a transcript.
        passed_s: That passed while these were transcribed.
        repeated_s: Of sound that was in more than one window, since an answer did not reach the end of its own.
        num_sessions: Sessions that are open now, whose sound comes while they are transcribed.
        session_s: Of sound that sessions have sent.
    """

    sound_s: float = 0.0
    passed_s: float = 0.0
    repeated_s: float = 0.0
    num_sessions: int = 0
    session_s: float = 0.0


class SoundOpener(AsyncClosing, Protocol):
    """Sound files as one channel at the model's rate, as `llmstack_media` decodes them."""

    @property
    def decoded_s(self) -> float:
        """Seconds of sound that were decoded."""
        ...

    @property
    def processor_s(self) -> float:
        """Processor time of what decodes."""
        ...

    @property
    def failures(self) -> Mapping[str, int]:
        """Files that were refused, by the code of the error."""
        ...

    async def open(self, source: BinaryIO, tenant: str = "", param: str = "file") -> Sound:
        """The sound of an open file, which stays the caller's.

        Raises:
            InvalidRequestError: It is damaged, of no allowed format, too short or too long.
            ServerOverloadedError: There is no room or no time for it.
        """
        ...

    async def fetch(self, url: str, tenant: str = "", param: str = "file_url") -> Sound:
        """Opens the sound that a URL names; it must be allowed."""
        ...

    async def begin(self, given_rate: int, tenant: str = "") -> LiveSound:
        """Sound that is yet to come: 16, 24 or 48 thousand samples a second.

        Raises:
            ServerOverloadedError: There is no room for it.
        """
        ...

    async def start(self) -> None:
        """Starts the process that decodes, for which the first file would wait."""
        ...


class Detection(NamedTuple):
    """The language and the speech at the start of a window.

    Attributes:
        no_speech_prob: Probability that there is no speech.
        languages: Codes of all languages to their probabilities, which sum to 1; most likely first. Empty for a model
            of English alone.
    """

    no_speech_prob: float
    languages: Mapping[str, float]

    @property
    def language(self) -> str | None:
        """The most likely language; None for a model of English alone."""
        return next(iter(self.languages), None)


class Speech:
    """The windows and prompts of one model that transcribes. Used by one event loop.

    Attributes:
        tokens: The ids that steer the model.
        sample_rate: Samples per second, in Hz.
        window_samples: Samples of a window at most.
        detection_sampling: Fields of the request whose prompt is `detection`.
        files: Opens sound files; None where windows alone are taken.
        counts: For metrics.
        alignment_params: Of the request whose prompt is `aligned`.
    """

    def __init__(
        self, tokens: SpeechTokens, windows: WindowOpener, sample_rate: int, window_samples: int, max_model_len: int,
        files: SoundOpener | None = None,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.files = files
        self.counts = SpeechCounts()
        self._max_previous = max_model_len // 2 - 1
        self.sample_rate = sample_rate
        self.window_samples = window_samples
        asked = [tokens.no_speech, *tokens.languages.values()]
        self.detection_sampling: Mapping[str, Any] = {
            "temperature": 0.0, "max_tokens": 1, "logprobs": 0, "logprob_token_ids": asked, "detokenize": False,
        }  # fmt: skip
        self.alignment_params = PoolingParams(task=PoolingTask.ALIGNMENT)
        self._windows = windows

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far, for metrics."""
        return self._windows.stats

    async def open(
        self, samples: Samples, tenant: str = "", rate: int | None = None, silence_s: int | None = None
    ) -> OpenedMedia:
        """A window of sound for requests of one tenant.

        Args:
            samples: Of one channel, from -1 to 1, as many as a window is long.
            tenant: An opaque id of the API key.
            rate: Of the samples, in Hz; None is `sample_rate`.
            silence_s: Of a window that may be shorter than those of the model's training, and costs less: seconds of
                silence behind the sound at least. None fills a whole window, as answers that are kept need it.

        Raises:
            InvalidRequestError: They are too many, not finite, or of a rate that no sound has.
        """
        return await self._windows.open(samples, tenant, rate, silence_s)

    def check(self, language: str | None, task: str = DEFAULT_TASK) -> None:
        """Raises as `prompt`, where a language that is not given is detected first."""
        self.start_ids(language or next(iter(self.tokens.languages), None), task)

    def prompt(
        self,
        window: OpenedMedia,
        *,
        language: str | None = None,
        task: str = DEFAULT_TASK,
        timestamps: bool = True,
        previous: Sequence[int] = (),
    ) -> RenderedPrompt:
        """The prompt of a window.

        Args:
            window: From `open`.
            language: A code of `tokens.languages`; None lets the model choose, which then transcribes.
            task: `transcribe` or `translate`.
            timestamps: Whether the answer has times.
            previous: Token ids of the text before; the last ones that fit in half of the context are kept.

        Raises:
            InvalidRequestError: The model does not know the language or the task.
        """
        token_ids = self.start_ids(language, task, timestamps=timestamps)
        return self._rendered(window, [*self._previous(previous), *token_ids])

    def detection(self, window: OpenedMedia, previous: Sequence[int] = ()) -> RenderedPrompt:
        """The prompt of a request of one token, whose log-probabilities tell language and silence."""
        return self._rendered(window, [*self._previous(previous), self.tokens.start])

    def aligned(
        self, window: OpenedMedia, answer: Sequence[int], *, language: str | None = None, task: str = DEFAULT_TASK
    ) -> RenderedPrompt:
        """The prompt of a request that pools with `alignment_params`.

        `answer`: Its token ids, as they came.

        Raises:
            InvalidRequestError: The model does not know the language or the task.
        """
        begin = self.start_ids(language, task)
        return self._rendered(window, [*begin, *(token for token in answer if token != self.tokens.end)])

    def words(
        self,
        output: PoolingRequestOutput,
        num_samples: int,
        bytes_of: Callable[[int], bytes],
        language: str | None = None,
    ) -> list[Word]:
        """The words of an answer that was `aligned`; takes 100 ms of a processor for 120 tokens.

        Args:
            output: Of the request that pooled.
            num_samples: Of the sound in the window.
            bytes_of: Of a token, as `Tokenizer.bytes_of`.
            language: Decides whether words have spaces between them.
        """
        token_ids = output.prompt_token_ids
        first = _end_of_start(token_ids, self.tokens)
        data = memoryview(output.outputs.data).cast("B")
        num_numbers = len(data) // len(token_ids)
        starts = self._windows.token_starts(data[first * num_numbers :], len(token_ids) - first, num_samples)
        ends = [*starts[1:], starts[-1]] if starts else []
        tokens = [TimedToken(*one) for one in zip(token_ids[first:], starts, ends, strict=True)]
        return words_of([one for one in tokens if one.token_id < self.tokens.end], bytes_of, language)

    def start_ids(self, language: str | None, task: str = DEFAULT_TASK, *, timestamps: bool = True) -> list[int]:
        """The tokens with which an answer begins; raises as `prompt`."""
        tokens = self.tokens
        if not tokens.is_multilingual:
            if language not in (None, "en") or task != DEFAULT_TASK:
                raise request_errors.unsupported_value("language", "this model transcribes English only")
            return [tokens.start] if timestamps else [tokens.start, tokens.no_timestamps]
        if task not in tokens.tasks:
            raise request_errors.unsupported_value("task", f"expected one of {', '.join(tokens.tasks)}")
        if language is None:
            if task != DEFAULT_TASK or not timestamps:
                raise request_errors.unsupported_value("language", "it is chosen for transcriptions with times only")
            return [tokens.start]
        if language not in tokens.languages:
            reason = f"'{request_errors.echo(language)}' is no language of this model"
            raise request_errors.unsupported_value("language", reason)
        start = [tokens.start, tokens.languages[language], tokens.tasks[task]]
        return start if timestamps else [*start, tokens.no_timestamps]

    def read_detection(self, output: CompletionOutput) -> Detection:
        """The result of the output of a `detection`.

        Raises:
            ValueError: It has no log-probabilities.
        """
        if not output.logprobs:
            raise ValueError("the output of a detection has log-probabilities")
        by_id = output.logprobs[0]
        languages = {code: math.exp(by_id[token].logprob) for code, token in self.tokens.languages.items()}
        total = sum(languages.values()) or 1.0
        ordered = sorted(languages, key=lambda code: (-languages[code], code))
        no_speech = math.exp(by_id[self.tokens.no_speech].logprob)
        return Detection(no_speech, {code: languages[code] / total for code in ordered})

    async def start(self) -> None:
        """Starts the process that decodes files, if there is one."""
        if self.files is not None:
            await self.files.start()

    async def shutdown(self) -> None:
        """Frees the spectrograms that are kept, and ends the children that decode. Idempotent."""
        self._windows.close()
        if self.files is not None:
            await self.files.shutdown()

    def _previous(self, token_ids: Sequence[int]) -> list[int]:
        mark = self.tokens.previous
        kept = token_ids[max(0, len(token_ids) - self._max_previous) :]
        return [] if mark is None or not kept else [mark, *kept]

    def _rendered(self, window: OpenedMedia, token_ids: list[int]) -> RenderedPrompt:
        return RenderedPrompt("", token_ids, media=(at_start(window),))


def _end_of_start(token_ids: Sequence[int], tokens: SpeechTokens) -> int:
    """The place behind the tokens with which an answer begins."""
    steering = {*tokens.languages.values(), *tokens.tasks.values(), tokens.no_timestamps}
    place = token_ids.index(tokens.start) + 1
    while place < len(token_ids) and token_ids[place] in steering:
        place += 1
    return place


def at_start(window: OpenedMedia) -> PlacedMedia:
    """The place of a window among the tokens of its prompt: the first one, which is computed like all others."""
    return PlacedMedia(window, "audio", 0, 1, ())


def make_speech(folder: Path, max_model_len: int, options: MediaOptions) -> Speech:
    """The windows and prompts of the model in a folder, whose context has so many tokens.

    Raises:
        EngineStartError: The checkpoint's feature extractor is not supported.
        ModelFilesError: A file lacks what is needed.
    """
    from llmstack_media.audio.files import SoundFiles
    from llmstack_media.audio.windows import WindowFront
    from llmstack_media.errors import ProcessorConfigError
    from llmstack_media.processors.sound import read_log_mel
    from llmstack_model_files import read_json, read_speech_tokens

    names = ("preprocessor_config", "processor_config")
    files = [read_json(folder, f"{name}.json", required=False) or {} for name in names]
    try:
        log_mel = read_log_mel(*files)
    except ProcessorConfigError as error:
        raise EngineStartError(f"the model transcribes, but {error}") from error
    windows = WindowFront(log_mel, cache_bytes=options.cache_bytes)
    sounds = SoundFiles(log_mel.sample_rate, make_fetcher(options), max_s=options.max_audio_s)
    return Speech(read_speech_tokens(folder), windows, log_mel.sample_rate, log_mel.num_samples, max_model_len, sounds)
