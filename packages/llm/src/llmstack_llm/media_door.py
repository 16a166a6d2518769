"""Media of requests on their way through a front end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits, limits_with
from llmstack_llm.admission.rules import check_token_ids
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_llm.chat.media_chat import render_with_media
from llmstack_llm.chat.renderers import ChatRenderers, rendering_work
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.media.prepared import prepare_all
from llmstack_llm.media.processor import MediaProcessor
from llmstack_llm.media.served import KINDS, make_served_media
from llmstack_llm.media.source import FORCED, KIND, SourcePrompts, make_source
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.requests import AdmittedRequest, ChatPrompt, RenderedPrompt
from llmstack_llm.speech.served import Speech, make_speech
from llmstack_llm.text.gate import TextGate
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import EngineReady, MediaItem
from llmstack_types.lifecycle import AsyncClosing

logger = logging.getLogger(__name__)
# A request whose media were opened has been submitted after so long: they are fetched and decoded by then.
PREPARING_S: Final = 60.0
_POLL_S: Final = 0.5
AdmittedT = TypeVar("AdmittedT", bound=AdmittedRequest | AdmittedPooling)


class MediaDoor:
    """Takes in the media of requests. A model for text alone costs nothing here.

    Attributes:
        processor: That of the model; None where the engine core takes text alone.
        speech: Windows and prompts of a model that transcribes; None for every other.
        source: Of a model whose prompts go to an encoder; None for every other.
    """

    def __init__(self, folder: Path, options: MediaOptions | None = None) -> None:
        """`folder`: That of the model."""
        self.processor: MediaProcessor | None = None
        self.speech: Speech | None = None
        self.source: SourcePrompts | None = None
        self._options = options or MediaOptions()
        self._folder = folder
        self._leaving: dict[asyncio.Task[None], Sequence[AsyncClosing]] = {}

    def set_unbounded(self) -> None:
        """Lets one caller have any number of items read and not decoded, in memory that is its own."""
        self._options = dataclasses.replace(self._options, source_bytes=sys.maxsize)

    def set_model(self, folder: Path, running: Callable[[], Collection[str]]) -> None:
        """Another model is served from the next `set_ready` on.

        What decodes for the model before ends when no request uses it any more; `running` says which there are.
        """
        if folder == self._folder:
            return
        former = [one for one in (self.processor, self.speech) if one is not None]
        if former:
            leaving = asyncio.create_task(self._leave(former, self.speech, running))
            self._leaving[leaving] = former
            leaving.add_done_callback(self._leaving.pop)
        self._folder, self.processor, self.speech, self.source = folder, None, None, None

    @staticmethod
    async def _leave(
        former: Sequence[AsyncClosing], speech: Speech | None, running: Callable[[], Collection[str]]
    ) -> None:
        await asyncio.sleep(PREPARING_S)
        users = set(running())
        while not users.isdisjoint(running()) or (speech is not None and speech.counts.num_sessions):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await _end(former)

    def set_ready(self, ready: EngineReady) -> None:
        """Makes the processor of the model that the engine core runs, unless it is there.

        Raises:
            EngineStartError: The checkpoint's processor is not supported.
        """
        media = ready.media
        if media is not None and KIND in media.num_layers:
            self.source = make_source(self._folder, media.max_num_tokens[KIND])
        elif media is not None and media.has_cross_attention and self.speech is None:
            self.speech = make_speech(self._folder, ready.max_model_len, self._options)
        kinds = () if media is None or media.has_cross_attention else media.num_layers.keys()
        takes_items = any(kind in kinds for kind in KINDS)
        if takes_items and self.processor is None and any(self._options.max_items.get(kind) != 0 for kind in KINDS):
            limits = limits_with(AdmissionLimits(ready.max_model_len, ready.vocab_size), ready)
            is_atomic = media is not None and media.is_atomic
            self.processor = make_served_media(self._folder, self._options, limits, is_atomic=is_atomic)
        elif not takes_items and self._options.whole:
            logger.warning(
                "%s: only its text is served; --language-model-only says that this is meant", self._options.whole
            )

    def placeholders(self, tokenizer: Tokenizer | None) -> Mapping[int, str]:
        """Tokens that stand for media in prompts, by id."""
        if self.processor is None or tokenizer is None:
            return {}
        tokens = {token for symbols in self.processor.symbols.values() for token in (symbols.token, *symbols.vectors)}
        ids = tokenizer.special_tokens
        return {ids[token]: token for token in tokens if token in ids}

    def placed(self, prompt: object, param: str, *, is_cut: bool) -> tuple[PlacedMedia, ...]:
        """The media of a prompt, which a model that transcribes needs.

        Raises:
            InvalidRequestError: They are to be cut, or there is no sound.
        """
        found = prompt.media if isinstance(prompt, RenderedPrompt) else ()
        if found and is_cut:
            raise request_errors.media_not_cut()
        if self.speech is not None and not found:
            raise request_errors.audio_required(param)
        return found

    def of_decoder(
        self, token_ids: list[int], sampling: CheckedSampling, param: str, limits: AdmissionLimits
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The tokens that the answer continues, and the item of a prompt that goes to an encoder instead.

        Raises:
            InvalidRequestError: As `SourcePrompts.take`; or the model has no such encoder, and a field needs one.
        """
        if self.source is not None:
            first, media = self.source.take(token_ids, sampling, param)
            check_token_ids(FORCED, first, limits.vocab_size)
            return first, media
        if sampling.values.get(FORCED) is not None:
            name = sampling.names.get(FORCED, FORCED)
            raise request_errors.unsupported_parameter(name, "this model has no encoder that reads the prompt")
        return token_ids, ()

    async def render(self, renderers: ChatRenderers, chat: ChatPrompt, gate: TextGate) -> RenderedPrompt:
        """The conversation as text and token ids, its media counted and not decoded; see `render_with_media`."""
        if self.processor is None:
            return await gate.run(rendering_work(chat), renderers.render, chat)
        return await render_with_media(renderers, chat, self.processor, gate)

    async def start(self) -> None:
        """Starts the process that decodes, if the model takes pictures or sound."""
        if self.processor is not None:
            await self.processor.start()
        if self.speech is not None:
            await self.speech.start()

    async def shutdown(self) -> None:
        """Ends the children that decode, those for models before too. Idempotent."""
        leaving = dict(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        own = [one for one in (self.processor, self.speech) if one is not None]
        await _end([*own, *(one for former in leaving.values() for one in former)])


async def _end(parts: Sequence[AsyncClosing]) -> None:
    await asyncio.gather(*(one.shutdown() for one in parts))


async def decode_media(
    admitted: Sequence[AdmittedT], check_room: Callable[[], object] | None = None
) -> list[AdmittedT]:
    """The requests with decoded media, which each request releases at its end.

    `check_room`: Raises where there is no room any more, since others may have joined the queue meanwhile.

    Raises:
        InvalidRequestError, ServerOverloadedError: As `OpenedMedia.prepare` and `check_room`; nothing is held.
    """
    decoded: list[AdmittedT] = []
    try:
        for one in admitted:
            if one.placed:
                prepared = await prepare_all(one.placed)
                one = dataclasses.replace(one, media=prepared.items, release=prepared.release)
            decoded.append(one)
        if check_room is not None:
            check_room()
    except BaseException:
        release_media(decoded)
        raise
    return decoded


def release_media(admitted: Sequence[AdmittedRequest | AdmittedPooling]) -> None:
    """Releases the media of requests that do not begin."""
    for one in admitted:
        if one.release is not None:
            one.release()
