"""Videos in containers: the frames of transformers' reader, counts that no header decides, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from media_helpers.films import film, read_by_transformers, smooth
from media_helpers.sounds import encoded, tone

from llmstack_media import decode_frames, read_clip
from llmstack_media.limits import MediaLimits
from llmstack_types import InvalidRequestError

LIMITS = MediaLimits()
FILMS = [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("matroska", "mpeg4")]


@pytest.mark.parametrize(("kind", "codec"), FILMS)
def test_frames_are_those_of_transformers(kind: str, codec: str) -> None:
    data = film(smooth(11), kind, codec)
    clip = read_clip(data, LIMITS)
    assert (clip.num_frames, clip.seconds, clip.width, clip.height) == (11, 2.75, 80, 56)
    assert not clip.is_list
    expected, seconds = read_by_transformers(data)
    found = list(decode_frames(data, range(11), LIMITS))
    assert np.array_equal(np.stack(found), expected)
    assert kind != "mp4" or seconds == clip.seconds
    some = list(decode_frames(data, (2, 2, 9), LIMITS))
    assert np.array_equal(np.stack(some), expected[[2, 2, 9]])


def refused(read: Callable[[], object]) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequestError) as caught:
        read()
    return caught.value.code, caught.value.message


def test_films_are_refused_by_name() -> None:
    data = film(smooth(8))
    assert refused(lambda: read_clip(data[: len(data) // 2], LIMITS))[0] == "invalid_image"  # its index is at the end
    assert refused(lambda: read_clip(encoded("mp4", tone(1.0, 48_000), "aac"), LIMITS))[1].endswith("no video in it.")
    for limits in (MediaLimits(max_video_pixels=80 * 56 * 7), MediaLimits(max_image_pixels=80 * 55)):
        assert refused(lambda limits=limits: read_clip(data, limits))[0] == "image_too_large"
    assert refused(lambda: list(decode_frames(data, (1, 8), LIMITS)))[1].endswith("ends before its frame 8.")
    for head in (b"\0\0\0\x18ftypisom", b"\x1aE\xdf\xa3"):
        for text in (b"v=0\r\nm=video 5004 RTP/AVP 96\r\n", b"#EXTM3U\nhttp://127.0.0.1:9/a.ts\n", bytes(5000)):
            assert refused(lambda text=text, head=head: read_clip(head + text, LIMITS))[0] == "invalid_image"


def test_without_pyav_a_film_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmstack_media.decode import containers

    monkeypatch.setattr(containers, "has_av", lambda: False)
    for read in (lambda data: read_clip(data, LIMITS), lambda data: list(decode_frames(data, [0], LIMITS))):
        code, message = refused(lambda read=read: read(b"\x1aE\xdf\xa3" + bytes(99)))
        assert code == "unsupported_media_format"
        assert "llmstack-media[av]" in message


def test_a_stream_without_an_end_is_counted_as_far_as_it_goes() -> None:
    data = film(smooth(11), "webm", "libvpx")
    clip = read_clip(data[: len(data) * 3 // 4], LIMITS)
    assert 1 < clip.num_frames <= 11
    frames = list(decode_frames(data[: len(data) * 3 // 4], range(clip.num_frames - 1), LIMITS))
    assert np.array_equal(np.stack(frames), read_by_transformers(data)[0][: len(frames)])
