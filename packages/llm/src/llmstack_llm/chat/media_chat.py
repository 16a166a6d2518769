"""Conversations with pictures: laid out, counted, and only then tokenized."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from llmstack_llm import request_errors
from llmstack_llm.chat.renderer import ChatRenderer, LaidOutChat
from llmstack_llm.chat.renderers import ChatRenderers, rendering_work
from llmstack_llm.media.parts import MediaPart, take_media
from llmstack_llm.media.placeholders import expand_symbols, expand_tokens
from llmstack_llm.media.prepared import open_all
from llmstack_llm.media.processor import MediaProcessor, OpenedMedia
from llmstack_llm.requests import ChatPrompt, RenderedPrompt
from llmstack_llm.text.gate import TextGate
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types.vocabulary import MediaKind

_Items = Sequence[tuple[MediaKind, OpenedMedia]]


async def render_with_media(
    renderers: ChatRenderers, chat: ChatPrompt, processor: MediaProcessor, gate: TextGate
) -> RenderedPrompt:
    """The conversation with its media in place, counted and not decoded.

    Raises:
        InvalidRequestError: The messages or a part are malformed, the template does not accept them, the prompt is too
            long, or a part cannot be had.
        ServerOverloadedError: Too much is waiting.
    """
    messages, parts = take_media(chat.messages, processor.max_items)
    if not parts:
        return await gate.run(rendering_work(chat), renderers.render, chat)
    if chat.is_cut:
        raise request_errors.media_not_cut()
    chat = dataclasses.replace(chat, messages=messages)
    renderer = renderers.pick(has_tools=bool(chat.tools), chat_template=chat.chat_template)
    laid_out = await gate.run(rendering_work(chat), renderer.lay_out, chat, processor.symbols)
    items = await open_all(processor, parts, chat.tenant, chat.media_options, chat.media_request)
    num_chars = len(laid_out.text) + sum(len(piece) for _, one in items for piece, _ in one.pieces)
    with _closed_on_refusal(items):
        return await gate.run(num_chars, _place, renderer, laid_out, items, processor)


def _place(renderer: ChatRenderer, laid_out: LaidOutChat, items: _Items, processor: MediaProcessor) -> RenderedPrompt:
    special_tokens = renderer.tokenizer.special_tokens
    expanded = expand_symbols(laid_out.text, items, processor.symbols, special_tokens)
    rendered = renderer.encode(LaidOutChat(expanded.text, laid_out.guard))
    token_ids, placed = expand_tokens(rendered.token_ids, expanded, items)
    return RenderedPrompt(rendered.text, token_ids, media=tuple(placed))


async def render_text_with_media(
    tokenizer: Tokenizer,
    text: str,
    parts: Sequence[MediaPart],
    processor: MediaProcessor,
    options: Mapping[str, object] | None = None,
) -> RenderedPrompt:
    """A prompt that spells the symbol of each of its media, such as `<image>`, with them in place, not decoded.

    Raises:
        InvalidRequestError: There are more or fewer symbols than parts, or a part cannot be had.
        ServerOverloadedError: Too much is waiting.
    """
    items = await open_all(processor, parts, "", options)
    with _closed_on_refusal(items):
        expanded = expand_symbols(text, items, processor.symbols, tokenizer.special_tokens)
        token_ids, placed = expand_tokens(tokenizer.encode(expanded.text), expanded, items)
    return RenderedPrompt(expanded.text, token_ids, media=tuple(placed))


@contextlib.contextmanager
def _closed_on_refusal(items: _Items) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for _, one in items:
            one.close()
        raise
