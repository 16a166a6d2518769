"""An engine core of another machine gets the bytes of items, in one message or not at all."""

from pathlib import Path

import pytest

from llmstack_engine_client.clients import media_data
from llmstack_engine_client.clients.media_data import with_media_data
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaMemory, SamplingParams


def request(*memories: MediaMemory | None) -> EngineCoreRequest:
    media = tuple(
        MediaItem(bytes(32), "image", 2 * place, 2, num_units=1, memory=memory) for place, memory in enumerate(memories)
    )
    return EngineCoreRequest("a", [7] * 2 * len(media), SamplingParams(), media=media)


def test_bytes_take_the_place_of_files(tmp_path: Path) -> None:
    (tmp_path / "item").write_bytes(b"abc")
    given = request(MediaMemory(3, path=str(tmp_path / "item")), MediaMemory(2, data=b"xy"), None)
    memories = [item.memory for item in with_media_data(given).media]
    assert memories == [MediaMemory(3, data=b"abc"), MediaMemory(2, data=b"xy"), None]
    assert with_media_data(request(MediaMemory(3, path=str(tmp_path / "item")))).media[0].memory.data == b"abc"


@pytest.mark.parametrize("size", [2, 4])
def test_a_file_of_another_size_is_refused_by_name(tmp_path: Path, size: int) -> None:
    (tmp_path / "item").write_bytes(b"abc")
    with pytest.raises(InvalidRequestError, match="cannot be read: it has") as caught:
        with_media_data(request(MediaMemory(1, data=b"x"), MediaMemory(size, path=str(tmp_path / "item"))))
    assert caught.value.param == "media[1]"


def test_a_file_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        with_media_data(request(MediaMemory(3, path=str(tmp_path / "gone"))))


def test_more_than_a_message_holds_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_data, "MAX_MEDIA_BYTES", 5)
    with pytest.raises(InvalidRequestError, match="have 6 bytes; 5 can be sent") as caught:
        with_media_data(request(MediaMemory(3, path="/nowhere"), MediaMemory(3, path="/nowhere")))
    assert (caught.value.param, caught.value.code) == ("media", "image_too_large")
