"""Media parts of messages: every form that clients send, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.chat.messages import normal_messages
from llmstack_llm.media.parts import MediaMark, MediaPart, has_media, take_media
from llmstack_llm.media.processor import MediaSymbols
from llmstack_types import InvalidRequestError

URL = "data:image/png;base64,AAAA"
PARAM = "messages[0].content[1]"
TEXT = {"type": "text", "text": "look"}


def taken(part: Any) -> MediaPart:
    messages, parts = take_media([{"role": "user", "content": [TEXT, part]}], {"image": 2})
    assert messages[0]["content"] == [TEXT, MediaMark("image")]
    (one,) = parts
    return one


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, MediaPart("image", URL, param=PARAM)),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, MediaPart("image", URL, "", "low", PARAM)),
        ({"type": "image_url", "image_url": URL}, MediaPart("image", URL, param=PARAM)),
        ({"image_url": URL}, MediaPart("image", URL, param=PARAM)),
        ({"image_url": {"url": URL}}, MediaPart("image", URL, param=PARAM)),
        ({"type": "image", "image": URL}, MediaPart("image", URL, param=PARAM)),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, MediaPart("image", URL, "", "high", PARAM)),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": "a"}, MediaPart("image", URL, "a", "auto", PARAM)),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, MediaPart("image", "", "a", "auto", PARAM)),
        ({"type": "image_url", "uuid": "a"}, MediaPart("image", "", "a", "auto", PARAM)),
    ],
)
def test_each_form_of_a_picture_is_read(part: dict[str, Any], expected: MediaPart) -> None:
    assert taken(part) == expected


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "image_url"}, f"{PARAM}.image_url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {}}, f"{PARAM}.image_url.url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": 3}, f"{PARAM}.image_url", "invalid_type"),
        ({"type": "image_url", "image_url": {"url": [URL]}}, f"{PARAM}.image_url.url", "invalid_type"),
        ({"type": "image_url", "image_url": "\ud800"}, f"{PARAM}.image_url", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "x"}}, f"{PARAM}.detail", "invalid_value"),
        ({"type": "image_url", "image_url": URL, "uuid": 3}, f"{PARAM}.uuid", "invalid_type"),
        ({"type": "input_audio", "input_audio": {"data": "A"}}, f"{PARAM}.type", "unsupported_parameter"),
        ({"type": "video_url", "video_url": URL}, f"{PARAM}.type", "unsupported_parameter"),
        ({"type": "file", "file": {}}, f"{PARAM}.type", "unsupported_parameter"),
    ],
)
def test_what_is_no_picture_is_named(part: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        taken(part)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_one_picture_too_many_is_named() -> None:
    picture = {"type": "image_url", "image_url": URL}
    messages = [{"role": "user", "content": [picture, picture]}, {"role": "user", "content": [TEXT, picture]}]
    with pytest.raises(InvalidRequestError) as caught:
        take_media(messages, {"image": 2})
    assert (caught.value.param, caught.value.code) == ("messages[1].content[1]", "too_many_images")


@pytest.mark.parametrize(
    "messages",
    [[], ["x"], [{"role": "user"}], [{"role": "user", "content": "look"}], [{"role": "user", "content": [TEXT, 3]}]],
)
def test_messages_without_media_stay_as_they_are(messages: list[Any]) -> None:
    assert take_media(messages, {"image": 2}) == (messages, [])
    assert not has_media(messages)


def test_a_request_cannot_hold_a_mark() -> None:
    messages, parts = take_media([{"role": "user", "content": [["image"], {"kind": "image"}]}], {"image": 2})
    assert not parts
    assert not any(isinstance(one, MediaMark) for one in messages[0]["content"])


def test_an_item_that_is_read_already_is_taken_as_it_is() -> None:
    read = MediaPart("image", URL, param="input[3].output[0]")
    messages = [{"role": "user", "content": [TEXT, read]}]
    assert has_media(messages)
    shown, parts = take_media(messages, {"image": 1})
    assert (shown[0]["content"], parts) == ([TEXT, MediaMark("image")], [read])
    for refuse in (lambda: take_media(messages, {}), lambda: normal_messages(messages)):
        with pytest.raises(InvalidRequestError) as caught:
            refuse()
        assert (caught.value.param, caught.value.code) == ("input[3].output[0].type", "unsupported_parameter")
    with pytest.raises(InvalidRequestError) as caught:
        take_media([*messages, *messages], {"image": 1})
    assert (caught.value.param, caught.value.code) == ("input[3].output[0]", "too_many_images")


SOUND_URL = "data:audio/wav;base64,AAAA"
GIVEN = {"data": "AAAA", "format": "wav"}


def test_each_form_of_a_sound_is_read() -> None:
    forms: list[Any] = [
        {"type": "input_audio", "input_audio": GIVEN}, {"input_audio": GIVEN}, {"type": "audio", "audio": SOUND_URL},
        {"type": "audio_url", "audio_url": SOUND_URL}, {"audio_url": {"url": SOUND_URL}},
    ]  # fmt: skip
    _, parts = take_media([{"role": "user", "content": forms}], {"audio": 5})
    assert parts == [MediaPart("audio", SOUND_URL, param=f"messages[0].content[{index}]") for index in range(5)]
    named = {"type": "input_audio", "input_audio": None, "uuid": "a"}
    _, (one,) = take_media([{"role": "user", "content": [named]}], {"audio": 1})
    assert (one.url, one.uuid) == ("", "a")


@pytest.mark.parametrize(
    ("given", "field", "code"),
    [
        ({"format": "wav"}, ".data", "missing_required_parameter"),
        ({"data": "A"}, ".format", "missing_required_parameter"),
        ({"data": "A", "format": "midi"}, ".format", "invalid_value"),
        ({"data": 3, "format": "wav"}, ".data", "invalid_type"),
        ("AAAA", "", "invalid_type"),
    ],
)
def test_what_is_no_sound_is_named(given: Any, field: str, code: str) -> None:
    part = {"type": "input_audio", "input_audio": given}
    with pytest.raises(InvalidRequestError) as caught:
        take_media([{"role": "user", "content": [TEXT, part]}], {"audio": 1})
    assert (caught.value.param, caught.value.code) == (f"{PARAM}.input_audio{field}", code)


def test_items_in_a_text_may_be_numbered() -> None:
    symbols = MediaSymbols("<a>", "Audio {number}: <a>")
    assert symbols.put_into("@ and @, {number}", "@") == "Audio 1: <a> and Audio 2: <a>, {number}"
    assert symbols.put_into("none", "@") == "none"
