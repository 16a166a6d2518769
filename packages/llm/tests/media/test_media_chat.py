"""Conversations with pictures become tokens with places, and their pictures are held as long as the request lives."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from llm_helpers.engines import first_request, make
from llm_helpers.pictures import PIECES, FakePictures

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.chat.media_chat import render_with_media
from llmstack_llm.chat.renderers import ChatRenderers
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.requests import ChatPrompt, GenerationRequest, RenderedPrompt
from llmstack_llm.testing import FakeEngineCoreClient, byte_tokenizer
from llmstack_llm.text.gate import TextGate
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import InvalidRequestError, PoolingParams

PARTS = (
    "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
FORGETFUL = "{% for m in messages %}<s>{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
TOKENIZER = Tokenizer(byte_tokenizer(("<s>", "<image>", "<row>")))
SPECIAL = TOKENIZER.special_tokens


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def rendered(content: Any, pictures: FakePictures, template: str = PARTS, **options: Any) -> RenderedPrompt:
    renderers = ChatRenderers(ChatTemplate(template), TOKENIZER)
    chat = ChatPrompt([{"role": "user", "content": content}], **options)
    return await render_with_media(renderers, chat, pictures, TextGate())


def expected_ids(*parts: str | None) -> list[int]:
    """Token ids of texts, and of a picture for each None."""
    ids = [SPECIAL["<s>"]]
    for part in parts:
        if part is not None:
            ids += TOKENIZER.encode_plain(part)
            continue
        for text, count in PIECES:
            one = [SPECIAL[text]] if text in SPECIAL else TOKENIZER.encode_plain(text)
            ids += one * max(count, 1)
    return ids


async def test_pictures_stand_where_the_parts_stood() -> None:
    pictures = FakePictures()
    content = [{"type": "text", "text": "a"}, picture("1"), {"type": "text", "text": "b"}, picture("2")]
    prompt = await rendered(content, pictures, tenant="t")
    assert prompt.token_ids == expected_ids("a", None, "b", None)
    assert pictures.opened == [("1", "t"), ("2", "t")]
    assert not pictures.decoded
    for place in prompt.media:
        assert place.embed_runs == ((0, 3), (4, 2))
        ids = prompt.token_ids[place.offset : place.offset + place.num_tokens]
        assert [token_id == SPECIAL["<image>"] for token_id in ids] == [True] * 3 + [False] + [True] * 2
    assert [place.num_vectors for place in prompt.media] == [5, 5]


async def test_templates_of_texts_get_pictures_before_the_texts() -> None:
    prompt = await rendered([{"type": "text", "text": "a"}, picture("1")], FakePictures(), TEXTS)
    assert prompt.token_ids == expected_ids(None, "\na")


@pytest.mark.parametrize("template", [PARTS, TEXTS])
async def test_a_text_that_spells_a_symbol_is_no_picture(template: str) -> None:
    prompt = await rendered([{"type": "text", "text": "<image>"}, picture("1")], FakePictures(), template)
    spelled = TOKENIZER.encode_plain("<image>")
    assert SPECIAL["<image>"] not in spelled
    assert prompt.token_ids == expected_ids(*(("<image>", None) if template is PARTS else (None, "\n<image>")))
    assert len(prompt.media) == 1


async def test_a_conversation_without_pictures_is_rendered_as_ever() -> None:
    prompt = await rendered([{"type": "text", "text": "<image>"}], FakePictures())
    assert (prompt.token_ids, prompt.media) == (expected_ids("<image>"), ())


async def test_a_template_that_does_not_show_a_picture_is_refused() -> None:
    pictures = FakePictures()
    with pytest.raises(InvalidRequestError) as caught:
        await rendered([picture("1"), {"type": "text", "text": "a"}], pictures, FORGETFUL)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")
    assert pictures.closed == ["1"]


async def test_a_tokenizer_without_the_token_of_pictures_is_refused() -> None:
    plain = Tokenizer(byte_tokenizer(("<s>", "<row>")))
    chat = ChatPrompt([{"role": "user", "content": [picture("1")]}])
    with pytest.raises(InvalidRequestError) as caught:
        await render_with_media(ChatRenderers(ChatTemplate(PARTS), plain), chat, FakePictures(), TextGate())
    assert (caught.value.param, caught.value.code) == ("messages", "unsupported_value")


async def test_one_picture_that_cannot_be_had_ends_the_request() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await rendered([picture("1"), picture("absent:2")], FakePictures())
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1]", "media_fetch_failed")


async def test_a_prompt_with_pictures_is_not_cut() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await rendered([picture("1")], FakePictures(), is_cut=True)
    assert caught.value.param == "truncate_prompt_tokens"


class Door:
    """A front end over a scripted engine core, whose model takes pictures."""

    def __init__(self, folder: Path, client: FakeEngineCoreClient) -> None:
        self.llm: AsyncLLM = make(folder, client, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        self.pictures = FakePictures()
        self.llm.input_processor.media.processor = self.pictures

    async def submit(self, *urls: str, **sampling: Any) -> Any:
        chat = ChatPrompt([{"role": "user", "content": [*map(picture, urls), {"type": "text", "text": "a"}]}])
        prompt = await self.llm.render(chat, GivenSampling({"max_tokens": 4, **sampling}))
        return await self.llm.submit(GenerationRequest("r", prompt, prompt.sampling))


@pytest.fixture
def door(text_folder: Path, client: FakeEngineCoreClient) -> Door:
    return Door(text_folder, client)


async def test_items_reach_the_engine_core_and_are_released_at_the_end(door: Door, client: Any) -> None:
    async with await door.submit("1", "2", n=2) as stream:
        assert door.pictures.num_held == 2
        for request in client.added:
            assert [item.offset for item in request.media] == [one.offset for one in stream.prompts[0].placed]
            assert all(item.memory is not None for item in request.media)
        assert len(client.added) == 2
        async for _ in stream:
            pass
    assert door.pictures.num_held == 0


async def test_a_reader_that_leaves_releases_the_pictures(door: Door) -> None:
    async with await door.submit("1", max_tokens=100):
        assert door.pictures.num_held == 1
    assert door.pictures.num_held == 0


async def test_pictures_of_a_prompt_to_pool_are_held_until_its_end(door: Door, client: Any) -> None:
    client.ready = dataclasses.replace(client.ready, embedding_size=4)
    door.llm.input_processor.set_ready(client.ready)
    chat = ChatPrompt([{"role": "user", "content": [picture("1"), {"type": "text", "text": "a"}]}])
    prompt = await door.llm.render(chat)
    outputs = door.llm.encode(prompt, PoolingParams(), "p")
    waiting = asyncio.create_task(anext(outputs))
    await first_request(client)
    (request,) = client.added
    assert ([item.offset for item in request.media], door.pictures.num_held) == ([prompt.media[0].offset], 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert door.pictures.num_held == 0
    broken = await door.llm.render(ChatPrompt([{"role": "user", "content": [picture("broken:1")]}]))
    with pytest.raises(InvalidRequestError, match="damaged"):
        await anext(door.llm.encode(broken, PoolingParams(), "q"))
    with pytest.raises(InvalidRequestError, match="not cut"):
        await anext(door.llm.encode(prompt, PoolingParams(truncate_prompt_tokens=2), "r"))


async def test_a_damaged_picture_holds_no_other(door: Door, client: Any) -> None:
    with pytest.raises(InvalidRequestError, match="damaged"):
        await door.submit("1", "broken:2", "3")
    assert door.pictures.num_held == 0
    assert not client.added


async def test_a_request_without_a_place_decodes_nothing(door: Door) -> None:
    with pytest.raises(InvalidRequestError):
        await door.submit("1", max_tokens=100_000)
    assert not door.pictures.decoded


async def test_an_id_in_use_releases_the_pictures(door: Door, client: Any) -> None:
    async with await door.submit("1", max_tokens=100):
        await first_request(client)
        with pytest.raises(InvalidRequestError, match="in use"):
            await door.submit("2")
        assert door.pictures.num_held == 1
    await asyncio.sleep(0)
    assert door.pictures.num_held == 0
