"""Choice of the chat template: the model's, its one for tools, or the request's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.chat.renderer import ChatRenderer, LengthCheck, allow_any_length
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_files import ChatTemplateError, find_chat_template
from llmstack_llm.media.processor import MediaProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.requests import ChatPrompt, RenderedPrompt
from llmstack_llm.text.gate import MAX_LARGE_CHARS
from llmstack_llm.text.prompt_formats import with_known_tokens
from llmstack_llm.text.tokenizer import MAX_CHARS_ON_LOOP, Tokenizer
from llmstack_model_files import SPEECH_ARCHITECTURE
from llmstack_types.vocabulary import MediaKind

logger = logging.getLogger(__name__)

MAX_KEPT_TEMPLATES = 8
CHARS_PER_VALUE = 8
"""Characters for a message, a part or a field beside its text: about a thousand are rendered on the event loop."""
MAX_COUNTED_VALUES = 1 << 14
"""Counting more would hold the event loop; a conversation with more of them is rendered alone."""
_KINDS_OF_PAGE: Final[tuple[MediaKind, ...]] = ("image", "audio")


class PictureLimits(NamedTuple):
    """Limits of pictures in requests.

    Attributes:
        max_items: Pictures in one conversation.
        max_bytes: Of a file.
        max_pixels: Width × height.
    """

    max_items: int
    max_bytes: int
    max_pixels: int


class SoundLimits(NamedTuple):
    """Limits of sounds in requests.

    Attributes:
        max_items: Sounds in one conversation.
        max_bytes: Of a file.
    """

    max_items: int
    max_bytes: int


class ChatFacts(NamedTuple):
    """Facts about a model for a page with chats.

    Attributes:
        has_template: Whether the model has a chat template; without one messages are joined by newlines.
        has_system_prompt: Whether its template shows a system message.
        default_max_tokens: The longest answer where a request sets none; None for all that fits.
        pictures: None for a model that takes none.
        sounds: The same of sounds.
    """

    has_template: bool
    has_system_prompt: bool
    default_max_tokens: int | None
    pictures: PictureLimits | None = None
    sounds: SoundLimits | None = None


class ChatRenderers:
    """The renderers of one model; a few templates of requests are kept compiled."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        content_format: str = "auto",
        check_length: LengthCheck = allow_any_length,
    ) -> None:
        self._tokenizer = tokenizer
        self._content_format = content_format
        self._check_length = check_length
        self._default = self._renderer(template)
        self._with_tools = self._default
        if template.tool_template is not None:
            self._with_tools = self._renderer(template.tool_template)
        self._source_to_renderer: dict[str, ChatRenderer] = {}

    def render(self, chat: ChatPrompt) -> RenderedPrompt:
        """The conversation as text and as token ids.

        Raises:
            InvalidRequestError: The messages are malformed, the template does not accept them, or the text is too long.
        """
        renderer = self.pick(has_tools=bool(chat.tools), chat_template=chat.chat_template)
        return renderer.encode(renderer.lay_out(chat))

    def pick(self, *, has_tools: bool, chat_template: str | None = None) -> ChatRenderer:
        """The renderer for one conversation; `chat_template` is the request's own, as text.

        Raises:
            InvalidRequestError: It is no template.
        """
        if chat_template is not None:
            return self._of_request(chat_template)
        return self._with_tools if has_tools else self._default

    def _of_request(self, source: str) -> ChatRenderer:
        found = self._source_to_renderer.pop(source, None)
        if found is None:
            try:
                found = self._compile(source)
            except ChatTemplateError:
                raise request_errors.invalid_value("chat_template", "it is no valid Jinja template") from None
        self._source_to_renderer[source] = found  # the newest last
        if len(self._source_to_renderer) > MAX_KEPT_TEMPLATES:
            del self._source_to_renderer[next(iter(self._source_to_renderer))]
        return found

    def _compile(self, source: str) -> ChatRenderer:
        return self._renderer(ChatTemplate(source, self._tokenizer.named_tokens))

    def _renderer(self, template: ChatTemplate) -> ChatRenderer:
        return ChatRenderer(
            template, self._tokenizer, content_format=self._content_format, check_length=self._check_length
        )


def chat_facts(
    renderers: ChatRenderers, model_config: ModelConfig, limits: AdmissionLimits, media: MediaProcessor | None
) -> ChatFacts | None:
    """Facts for a page with chats; None for a model that does not complete text."""
    if not limits.is_generative:
        return None
    renderer = renderers.pick(has_tools=False)
    default_max_tokens = model_config.default_sampling.get("max_tokens")
    has_template = not renderer.template.is_fallback
    pictures, sounds = (0 if media is None else media.max_items.get(kind, 0) for kind in _KINDS_OF_PAGE)
    return ChatFacts(
        has_template,
        renderer.has_system_prompt,
        default_max_tokens,
        PictureLimits(pictures, media.max_bytes, media.max_pixels) if media and pictures else None,
        SoundLimits(sounds, media.max_bytes) if media and sounds else None,
    )


def load_chat_template(
    model_config: ModelConfig, tokenizer: Tokenizer | None, override: str | ChatTemplate | None
) -> ChatTemplate:
    """The model's template, the override, or the plain fallback, which is said in the log.

    Raises:
        ChatTemplateError: The template cannot be used.
    """
    if isinstance(override, ChatTemplate):
        return override
    config = {} if tokenizer is None else tokenizer.config
    source, tool_source = (
        find_chat_template(model_config.tokenizer_path, config, override=override, has_tools=has_tools)
        for has_tools in (False, True)
    )
    if source is None and tokenizer is not None and model_config.architecture != SPEECH_ARCHITECTURE:
        logger.warning("the model has no chat template: messages are joined by newlines (chat_template sets one)")
    if tokenizer is not None:
        source, tool_source = (
            text and with_known_tokens(text, tokenizer.special_tokens) for text in (source, tool_source)
        )
    return ChatTemplate(
        source,
        {} if tokenizer is None else tokenizer.named_tokens,
        tool_source=None if tool_source == source else tool_source,
        response_template=config.get("response_template") if override is None else None,
    )


def rendering_work(chat: ChatPrompt) -> int:
    """The work of rendering a conversation, in characters of text; its values are unchecked."""
    pending: list[object] = [chat.messages, chat.tools, chat.documents, chat.template_kwargs]
    num_values = num_chars = 0
    while pending:
        value = pending.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        if num_values + len(pending) > MAX_COUNTED_VALUES:
            return max(num_chars, MAX_LARGE_CHARS)
    work = num_chars + CHARS_PER_VALUE * num_values
    # A template of the request's own may have to be compiled.
    return work if chat.chat_template is None else max(work, MAX_CHARS_ON_LOOP + 1)
