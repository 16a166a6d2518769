"""An engine core of another machine gets the bytes of items in messages of their own, or not at all."""

from pathlib import Path

import pytest

from llmstack_engine_client.clients import media_data
from llmstack_engine_client.clients.media_data import media_messages
from llmstack_engine_core.arriving_media import ArrivingMedia
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, MediaBytes
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaMemory, SamplingParams


def request(*memories: MediaMemory | None) -> EngineCoreRequest:
    media = tuple(
        MediaItem(bytes(32), "image", 2 * place, 2, num_units=1, memory=memory) for place, memory in enumerate(memories)
    )
    return EngineCoreRequest("a", [7] * 2 * len(media), SamplingParams(), media=media)


def sent(given: EngineCoreRequest) -> list[MediaBytes | EngineCoreRequest]:
    return [CLIENT_MESSAGES.decode(CLIENT_MESSAGES.encode(message))[1] for message in media_messages(given)]


def arrived(arriving: ArrivingMedia, messages: list[MediaBytes | EngineCoreRequest]) -> EngineCoreRequest:
    *parts, last = messages
    for part in parts:
        arriving.add(b"client", part)
    return arriving.complete(b"client", last)


@pytest.mark.parametrize("part_bytes", [1, 2, 100])
def test_bytes_take_the_place_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(media_data, "PART_BYTES", part_bytes)
    (tmp_path / "item").write_bytes(b"abc")
    (tmp_path / "other").write_bytes(b"defg")
    given = request(
        MediaMemory(3, path=str(tmp_path / "item")), MediaMemory(2, data=b"xy"), None,
        MediaMemory(4, path=str(tmp_path / "other")),
    )  # fmt: skip
    messages, arriving = sent(given), ArrivingMedia()
    assert len(messages) == 1 + {1: 7, 2: 4, 100: 2}[part_bytes]
    memories = [item.memory for item in arrived(arriving, messages).media]
    assert memories == [MediaMemory(3, data=b"abc"), MediaMemory(2, data=b"xy"), None, MediaMemory(4, data=b"defg")]
    assert arriving.num_bytes == 0


@pytest.mark.parametrize(("size", "reason"), [(2, "it has more than 2 bytes"), (4, "it has 3 bytes, and not 4")])
def test_a_file_of_another_size_is_refused_by_name(tmp_path: Path, size: int, reason: str) -> None:
    (tmp_path / "item").write_bytes(b"abc")
    with pytest.raises(InvalidRequestError, match=f"cannot be read: {reason}") as caught:
        sent(request(MediaMemory(1, data=b"x"), MediaMemory(size, path=str(tmp_path / "item"))))
    assert caught.value.param == "media[1]"


def test_a_file_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        sent(request(MediaMemory(3, path=str(tmp_path / "gone"))))


def test_more_than_can_be_sent_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_data, "MAX_MEDIA_BYTES", 5)
    with pytest.raises(InvalidRequestError, match="have 6 bytes; 5 can be sent") as caught:
        sent(request(MediaMemory(3, path="/nowhere"), MediaMemory(3, path="/nowhere")))
    assert (caught.value.param, caught.value.code) == ("media", "image_too_large")


def test_what_arrives_is_bounded_and_forgotten_with_its_client_or_its_request() -> None:
    arriving = ArrivingMedia(10)
    for client, name, size in ((b"one", "a", 4), (b"one", "b", 3), (b"two", "a", 2)):
        arriving.add(client, MediaBytes(name, bytes(size)))
    arriving.add(b"two", MediaBytes("a", bytes(2)))  # over the bound: what came before is useless
    assert arriving.num_bytes == 7
    arriving.drop(b"one", "a")
    arriving.drop(b"one", "unknown")
    assert arriving.num_bytes == 3
    arriving.drop(b"one")
    assert arriving.num_bytes == 0


def test_bytes_that_do_not_fit_the_items_refuse_the_request() -> None:
    for sizes in ((2,), (3, 2)):
        arriving = ArrivingMedia()
        for size in sizes:
            arriving.add(b"one", MediaBytes("a", bytes(size)))
        with pytest.raises(InvalidRequestError, match=f"have 4 bytes, and {sum(sizes)} came"):
            arriving.complete(b"one", request(MediaMemory(4)))
        assert arriving.num_bytes == 0
    assert ArrivingMedia().complete(b"one", request(MediaMemory(4))) == request(MediaMemory(4))
