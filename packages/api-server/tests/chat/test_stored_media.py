"""Pictures that messages name by the id of a file."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest

from llmstack_llm.media.parts import MediaPart
from llmstack_server.chat.stored_media import MAX_STORED_MEDIA, with_stored_media
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_types import InvalidRequestError


class Files:
    def __init__(self) -> None:
        self.asked: list[Set[str]] = []

    async def paths(self, file_ids: Set[str], owner: str) -> dict[str, str]:
        self.asked.append(file_ids)
        return {name: f"/{name}" for name in file_ids if name != "gone"}


def stored(*names: str) -> list[dict[str, Any]]:
    parts = [MediaPart("image", "", param=f"input[0].content[{index}]", file_id=one) for index, one in enumerate(names)]
    return [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, *parts]}]


async def test_all_files_of_a_conversation_are_looked_up_at_once() -> None:
    state, files = ready_state(FakeEngineClient()), Files()
    state.stored_files = files
    found = await with_stored_media(state, stored("f", "g", "f"))
    assert files.asked == [{"f", "g"}]
    assert [part.path for part in found[1]["content"][1:]] == ["/f", "/g", "/f"]
    plain = [{"role": "user", "content": [{"type": "text", "text": "b"}, MediaPart("image", "x")]}]
    assert await with_stored_media(state, plain) is plain
    assert len(files.asked) == 1


@pytest.mark.parametrize(("names", "has_files", "param", "code"), [
    (("f", "gone"), True, "input[0].content[1]", "not_found"),
    (("f",), False, "input[0].content[0]", "unsupported_parameter"),
    (("f",) * (MAX_STORED_MEDIA + 1), True, f"input[0].content[{MAX_STORED_MEDIA}]", "too_many_images"),
])  # fmt: skip
async def test_what_cannot_be_had_is_named(names: tuple[str, ...], has_files: bool, param: str, code: str) -> None:
    state, files = ready_state(FakeEngineClient()), Files()
    state.stored_files = files if has_files else None
    with pytest.raises(InvalidRequestError) as caught:
        await with_stored_media(state, stored(*names))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert len(files.asked) == (code == "not_found")
