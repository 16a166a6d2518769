"""Pictures of an `LLM`: counted and decoded beside the caller's thread."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.chat.media_chat import render_text_with_media
from llmstack_llm.chat.renderers import ChatRenderers
from llmstack_llm.media.parts import has_media
from llmstack_llm.media.source import FORCED
from llmstack_llm.media_door import AdmittedT, MediaDoor, decode_media, release_media
from llmstack_llm.offline.multi_modal_data import read_multi_modal_data
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.requests import AdmittedRequest, ChatPrompt, PromptInput, RenderedPrompt
from llmstack_llm.speech.prompts import MEDIA_KEY, is_sound_prompt, open_sound_prompt, read_sound_prompt
from llmstack_llm.speech.served import Speech
from llmstack_llm.text.gate import TextGate
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import ServerOverloadedError

ResultT = TypeVar("ResultT")
Request = AdmittedRequest | AdmittedPooling

_SOURCE_KEY = "encoder_prompt"
_KEYS: Final = ("prompt", MEDIA_KEY, "mm_processor_kwargs")


class OfflineMedia:
    """The media of one synchronous engine; without any it starts nothing."""

    def __init__(self, door: MediaDoor) -> None:
        self._door = door
        door.set_unbounded()
        self._gate = TextGate()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def render(self, renderers: ChatRenderers, chat: ChatPrompt) -> RenderedPrompt:
        """The conversation as text and token ids, its media counted; raises as `MediaDoor.render`."""
        if not has_media(chat.messages):
            return renderers.render(chat)
        return self._run(self._door.render(renderers, chat, self._gate))

    def read(self, prompt: PromptInput, tokenizer: Tokenizer | None, param: str) -> PromptInput:
        """A prompt with pictures or sound with these in place, counted; any other as it is.

        Raises:
            InvalidRequestError: It has other keys, no place for each picture, or a picture that cannot be had.
        """
        if self._door.speech is not None:
            return self._read_sound(self._door.speech, prompt, tokenizer, param)
        if self._door.source is not None:
            prompt = _source_of(prompt, param)
        if not isinstance(prompt, Mapping) or prompt.get(MEDIA_KEY) is None:
            return prompt
        return self._read_pictures(prompt, tokenizer, param)

    def _read_pictures(self, prompt: Mapping[str, object], tokenizer: Tokenizer | None, param: str) -> PromptInput:
        for key, value in prompt.items():
            if key not in _KEYS and value is not None:
                name = request_errors.echo(key)
                raise request_errors.unsupported_parameter(name, f"'{name}' beside '{MEDIA_KEY}'")
        text, options = prompt.get("prompt"), prompt.get("mm_processor_kwargs")
        if not isinstance(text, str):
            raise request_errors.invalid_type(param, f"a string beside '{MEDIA_KEY}'", text)
        if options is not None and not isinstance(options, Mapping):
            raise request_errors.invalid_type(f"{param}.mm_processor_kwargs", "a dict", options)
        check_text(param, text)
        processor = self._door.processor
        if processor is None or tokenizer is None:
            raise request_errors.unsupported_parameter(f"{param}.{MEDIA_KEY}", "this model takes text only")
        parts = read_multi_modal_data(f"{param}.{MEDIA_KEY}", prompt[MEDIA_KEY], processor.max_items)
        if not parts:
            return text
        for kind, symbols in processor.symbols.items():
            count = sum(part.kind == kind for part in parts)
            if text.count(symbols.token) != count:
                spelt = text.count(symbols.token)
                reason = f"it spells '{symbols.token}' {spelt} times, and there are {count} items of the kind {kind}"
                raise request_errors.invalid_value(param, reason)
        return self._run(render_text_with_media(tokenizer, text, parts, processor, options))

    def _read_sound(self, speech: Speech, prompt: PromptInput, tokenizer: Tokenizer | None, param: str) -> PromptInput:
        if not isinstance(prompt, Mapping) or not is_sound_prompt(prompt):
            return prompt
        return self._run(open_sound_prompt(read_sound_prompt(prompt, tokenizer, param), speech, "", param))

    def decode(self, requests: Sequence[Request]) -> list[Request]:
        """The first of the requests with their media decoded, as many as there is memory for, and at least one.

        Raises:
            InvalidRequestError: A picture is damaged; nothing is held.
            ServerOverloadedError: There is no memory for the first.
        """
        decoded: list[Request] = []
        try:
            for one in requests:
                decoded += [self.decode_one(one)]
        except ServerOverloadedError:
            if not decoded:
                raise
        except BaseException:
            release_all(decoded)
            raise
        return decoded

    def decode_one(self, request: AdmittedT) -> AdmittedT:
        """The request with its media decoded, until its `release`; raises as `decode`."""
        if not request.placed or request.release is not None:
            return request
        (one,) = self._run(decode_media([request]))
        return dataclasses.replace(one, release=functools.partial(self._release, one))

    def _release(self, request: Request) -> None:
        """Releases media on the loop, where their store is used; after the shutdown nothing is left to release."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(release_media, [request])

    def shutdown(self) -> None:
        """Ends the children that decode, and the loop. Idempotent."""
        loop, thread = self._loop, self._thread
        if (
            loop is None or thread is None or sys.is_finalizing()
        ):  # at the end of the interpreter the thread stands still
            return
        self._run(self._door.shutdown())
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of work on the loop; an interrupted caller cancels it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="llmstack-media", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def release_all(requests: Sequence[Request]) -> None:
    """Releases the media of requests that are over, or never began."""
    release_media(requests)


def conversation_list(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation becomes a list of one."""
    is_many = bool(messages) and not isinstance(messages[0], Mapping)
    return list(messages) if is_many else [messages]


def _source_of(prompt: PromptInput, param: str) -> PromptInput:
    """The encoder's prompt, of a prompt that may be divided into `encoder_prompt` and `decoder_prompt`, as in vLLM.

    Raises:
        InvalidRequestError: There is a prompt of the decoder, which begins with tokens of its own.
    """
    if not isinstance(prompt, Mapping) or prompt.get(_SOURCE_KEY) is None:
        return prompt
    others = [key for key, value in prompt.items() if key != _SOURCE_KEY and value is not None]
    if others:
        name = request_errors.echo(others[0])
        reason = f"the decoder begins with tokens of its own; '{FORCED}' of the sampling parameters is the next one"
        raise request_errors.unsupported_parameter(f"{param}.{name}", reason)
    source: PromptInput = prompt[_SOURCE_KEY]
    return source
