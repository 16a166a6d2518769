"""Prompts with pictures or sound on disk: found with the same items, and never with others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.cache_runner import BLOCK_SIZE
from engine_core_helpers.disk_core import PROMPT, Core
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler.media_numbers import MediaNumbers, media_keys, vector_places
from llmstack_engine_core.disk_cache.scopes import Chain, Scope
from llmstack_types import MediaItem, MediaMemory, MediaSpec, PrefixMedia

SPEC = MediaSpec(vector_size=4, num_layers={"image": 2, "audio": 2}, max_num_tokens={"image": 64, "audio": 64})
CAT, DOG = b"c" * 32, b"d" * 32
PIXELS = MediaMemory(1 << 10, data=bytes(1 << 10))
PLACEHOLDER = 5
SCOPE = Scope.of(b"secret", b"facts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def picture(digest: bytes = CAT, offset: int = 10, num_tokens: int = 20, **facts: Any) -> MediaItem:
    return MediaItem(digest, "image", offset, num_tokens, num_units=8, memory=PIXELS, **facts)


def ask(
    core: Core, media: tuple[MediaItem, ...], prompt: list[int] = PROMPT, **fields: Any
) -> tuple[list[int], int, int]:
    return core.ask(with_placeholders(prompt, media), media=media, **fields)


def with_placeholders(prompt: list[int], media: tuple[MediaItem, ...]) -> list[int]:
    token_ids = prompt.copy()
    for item in media:
        for places in vector_places(item):
            token_ids[places.start : places.stop] = [PLACEHOLDER] * len(places)
    return token_ids


def core_of(folder: Path) -> Core:
    return Core(folder, media=SPEC)


def test_a_prompt_behind_its_pictures_is_found_after_a_restart(folder: Path):
    media = (picture(), picture(DOG, 60, 8, embed_runs=((0, 3), (5, 3))))
    core = core_of(folder)
    tokens, *found = ask(core, media)
    assert found == [0, 0]
    core.close()
    core = core_of(folder)
    assert ask(core, media) == (tokens, 148, 148)
    assert ask(core, media) == (tokens, 148, 0), "now it is in memory"
    core.close()


def test_the_next_turn_finds_picture_and_answer(folder: Path):
    core = core_of(folder)
    tokens, *_ = ask(core, (picture(),))
    core.close()
    core = core_of(folder)
    assert ask(core, (picture(), picture(DOG, 160, 4)), [*PROMPT, *tokens, *range(20)])[1:] == (152, 152)
    core.close()


@pytest.mark.parametrize(
    "other",
    [
        picture(DOG), picture(layout=(1, 2, 2)), picture(offset=11), picture(num_tokens=21),
        picture(embed_runs=((0, 19),)), replace(picture(), kind="audio"), replace(picture(), num_units=9),
    ],
    ids=["digest", "layout", "offset", "length", "vectors", "kind", "units"],
)  # fmt: skip
def test_another_item_in_the_same_place_is_computed(folder: Path, other: MediaItem):
    core = core_of(folder)
    ask(core, (picture(),))
    core.close()
    core, fresh = core_of(folder), core_of(folder.with_name("fresh"))
    tokens, num_cached, num_read = ask(core, (other,))
    assert (num_cached, num_read) == (0, 0)
    assert tokens == ask(fresh, (other,))[0]
    core.close()
    fresh.close()


def test_text_is_not_found_where_a_picture_stood(folder: Path):
    core = core_of(folder)
    ask(core, (picture(offset=100),))
    core.close()
    core = core_of(folder)
    assert core.ask(with_placeholders(PROMPT, (picture(offset=100),)))[1:] == (96, 96), "as far as both are text"
    core.close()
    core = core_of(folder)
    assert ask(core, (picture(offset=100),))[1:] == (148, 148)
    core.close()


def test_a_salt_keeps_the_pictures_of_others_apart(folder: Path):
    core = core_of(folder)
    ask(core, (picture(),), cache_salt="a")
    core.close()
    core = core_of(folder)
    assert ask(core, (picture(),), cache_salt="b")[1] == 0
    assert ask(core, (picture(),), cache_salt="a")[1] == 148
    core.close()


def test_what_waits_to_be_written_keeps_no_pixels(folder: Path):
    core = core_of(folder)
    request = core.request(PROMPT, media=(picture(),))
    core.stored.hold(request)
    [(kept, text)] = core.stored._texts.values()
    assert kept.media == (replace(picture(), memory=None),)
    assert text == PROMPT
    core.stored.forget([request.request_id])
    core.close()


def items(draw: st.DrawFn, num_tokens: int) -> list[MediaItem]:
    """Items one after another, some with gaps between their vectors."""
    places = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=6)))
    found = []
    for start, end in pairwise(places):
        if draw(st.booleans()):
            continue
        length = end - start
        runs: tuple[tuple[int, int], ...] = ()
        if length > 2 and draw(st.booleans()):
            runs = ((0, 1), (2, length - 2))
        digest, layout = draw(st.sampled_from([CAT, DOG])), draw(st.sampled_from([(), (1,)]))
        found.append(MediaItem(digest, "image", start, length, runs, layout, 8))
    return found


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaItem]]:
    tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
    return tokens, items(draw, len(tokens))


@given(prompts(), prompts())
def test_two_prompts_share_a_name_only_where_memory_shares_a_block(
    one: tuple[list[int], list[MediaItem]], other: tuple[list[int], list[MediaItem]]
):
    numbers = MediaNumbers()
    keys, chains = [], []
    for tokens, media in (one, other):
        keys.append(media_keys(tokens, numbers.number(tokens, PrefixMedia("", tuple(media)))))
        chains.append(Chain(SCOPE, BLOCK_SIZE, tokens, media))
    for end in range(1, min(chain.num_blocks for chain in chains) + 1):
        if chains[0].name(end) == chains[1].name(end):
            assert keys[0][: end * BLOCK_SIZE] == keys[1][: end * BLOCK_SIZE]
            assert chains[0].head(0, end) == chains[1].head(0, end)


@given(prompts(), st.integers(0, 24))
def test_what_follows_changes_no_name(prompt: tuple[list[int], list[MediaItem]], cut: int):
    tokens, media = prompt
    whole = Chain(SCOPE, BLOCK_SIZE, tokens, media)
    before = [item for item in media if next(vector_places(item)).start < cut]
    part = Chain(SCOPE, BLOCK_SIZE, tokens[:cut], before)
    assert all(part.name(end) == whole.name(end) for end in range(part.num_blocks + 1))
    assert part.head(0, part.num_blocks) == whole.head(0, part.num_blocks)
