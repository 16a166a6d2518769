"""Odd files: the right picture, or a refusal by name. Nothing else is ever raised."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from media_helpers.pictures import as_file, bomb, noise, orientation, picture, png_chunk
from PIL import Image

from llmstack_media.decode.clips import decode_frames, read_clip
from llmstack_media.decode.headers import read_header
from llmstack_media.decode.pictures import decode_image
from llmstack_media.limits import MediaLimits
from llmstack_types import InvalidRequestError

LIMITS = MediaLimits()
COLOUR = Image.fromarray(noise(np.random.default_rng(11), 24, 16))
RED = (255, 0, 0)


def with_late_exif(value: int) -> bytes:
    """A PNG whose EXIF block stands behind its pixels."""
    data = as_file(COLOUR)
    block = orientation(value).tobytes().removeprefix(b"Exif\0\0")
    return data[:-12] + png_chunk(b"eXIf", block) + data[-12:]


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (24, 16), (40 * index, 0, 0)) for index in range(5)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return as_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=200, **options)


def refusal(work: Callable[[], object]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        work()
    return caught.value


SHOWN = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1), 7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG", "AVIF"])
@pytest.mark.parametrize("value", SHOWN)
def test_it_is_turned_as_its_exif_block_says(kind: str, value: int) -> None:
    exact = kind in ("PNG", "TIFF", "WEBP")
    options = {"lossless": True} if kind == "WEBP" else {} if exact else {"quality": 95}
    data = as_file(COLOUR, kind, exif=orientation(value), **options)
    expected = SHOWN[value](np.asarray(COLOUR)).astype(int)
    header, pixels = read_header(data, LIMITS), decode_image(data, LIMITS).astype(int)
    assert (header.height, header.width) == expected.shape[:2] == pixels.shape[:2]
    assert np.abs(pixels - expected).mean() <= (0 if exact else 12)


@pytest.mark.parametrize("value", SHOWN)
def test_an_exif_block_behind_the_pixels_of_a_png_counts_in_the_header(value: int) -> None:
    data = with_late_exif(value)
    pixels = decode_image(data, LIMITS)
    np.testing.assert_array_equal(pixels, SHOWN[value](np.asarray(COLOUR)))
    header = read_header(data, LIMITS)
    assert (header.height, header.width) == pixels.shape[:2]


@pytest.mark.parametrize("block", [b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"Exif\0\0garbage" * 9])
def test_a_damaged_exif_block_is_ignored(block: bytes) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        assert decode_image(as_file(COLOUR, kind, exif=block), LIMITS).shape == (16, 24, 3)


def test_an_orientation_beyond_eight_is_ignored() -> None:
    assert decode_image(as_file(COLOUR, exif=orientation(9)), LIMITS).shape == (16, 24, 3)


def test_cmyk_is_near_the_original_also_where_adobe_inverted_it() -> None:
    plain = Image.new("RGB", (24, 16), (94, 126, 189))
    data = as_file(plain.convert("CMYK"), "JPEG", quality=100)
    assert np.abs(decode_image(data, LIMITS).astype(int) - (94, 126, 189)).max() <= 4
    assert b"Adobe" in data  # Pillow writes it inverted with this marker, as Photoshop does


def test_sixteen_bits_keep_their_ramp() -> None:
    ramp = np.arange(0, 65536, 64, dtype=np.uint16).reshape(16, 64)
    for kind in ("PNG", "TIFF"):
        pixels = decode_image(as_file(Image.fromarray(ramp), kind), LIMITS)
        assert len(np.unique(pixels)) == 256
        np.testing.assert_array_equal(pixels[..., 1], ramp >> 8)


@pytest.mark.parametrize(("samples", "expected"), [
    (np.array([[0, 65_535]], np.int32), [0, 255]), (np.array([[0, 200]], np.int32), [0, 200]),
    (np.array([[-5, 2**31 - 1]], np.int32), [0, 255]), (np.array([[0, 0.5]], np.float32), [0, 128]),
    (np.array([[np.nan, 200]], np.float32), [0, 200]), (np.array([[0, 65_535]], np.float32), [0, 255]),
])  # fmt: skip
def test_samples_of_32_bits_are_scaled(samples: np.ndarray, expected: list[int]) -> None:
    pixels = decode_image(as_file(Image.fromarray(samples), "TIFF"), LIMITS)
    assert pixels[0, :, 0].tolist() == expected


def test_samples_that_are_infinite_are_refused() -> None:
    data = as_file(Image.fromarray(np.array([[0, np.inf]], np.float32)), "TIFF")
    assert refusal(lambda: decode_image(data, LIMITS)).code == "invalid_image"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "RGB", "16"])
def test_transparent_parts_show_the_background(mode: str) -> None:
    if mode == "P":
        image = Image.new("P", (4, 4), 0)
        image.putpalette([*RED, 0, 0, 255])
        files = [as_file(image, kind, transparency=0) for kind in ("PNG", "GIF")]
    elif mode == "16":
        files = [as_file(Image.fromarray(np.full((4, 4), 300, np.uint16)), transparency=300)]
    elif mode in ("RGBA", "LA"):
        image = Image.new(mode, (4, 4), (*RED, 0) if mode == "RGBA" else (7, 0))
        files = [as_file(image, kind) for kind in ("PNG", "TIFF", *(("WEBP", "AVIF") if mode == "RGBA" else ()))]
    else:
        colour = {"1": 1, "L": 9, "RGB": RED}[mode]
        files = [as_file(Image.new(mode, (4, 4), colour), transparency=255 if mode == "1" else colour)]
    for data in files:
        assert (decode_image(data, LIMITS) == 255).all()
        assert (decode_image(data, LIMITS, background=(1, 2, 3)) == (1, 2, 3)).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_an_animation_is_its_first_frame_or_frames_evenly_spread(kind: str) -> None:
    data = animation(kind)
    assert decode_image(data, LIMITS).max() <= 8
    assert read_clip(data, LIMITS) == (5, pytest.approx(1.0), 24, 16)
    whole = [*decode_frames(data, range(5), LIMITS)]
    assert [round(int(frame[0, 0, 0]), -1) for frame in whole] == [0, 40, 80, 120, 160]
    some = decode_frames(data, (0, 2, 4), LIMITS)
    assert [frame.tolist() for frame in some] == [whole[index].tolist() for index in (0, 2, 4)]


def test_an_animation_is_refused_by_the_pixels_of_all_its_frames() -> None:
    error = refusal(lambda: read_clip(animation("GIF"), MediaLimits(max_video_pixels=24 * 16 * 5 - 1)))
    assert error.code == "image_too_large"
    assert refusal(lambda: read_clip(as_file(COLOUR, "JPEG"), LIMITS)).code == "invalid_image"
    assert refusal(lambda: read_clip(b"no video", LIMITS)).code == "unsupported_media_format"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP"])
def test_a_truncated_file_is_refused_wherever_it_ends(kind: str) -> None:
    data = as_file(COLOUR, kind)
    for end in {*range(12, len(data) - 1, max(1, len(data) // 50)), len(data) // 2}:
        if kind in ("GIF", "PNG") and end > len(data) - 16:
            continue  # all pixels are there
        try:
            decode_image(data[:end], LIMITS)
        except InvalidRequestError as error:
            assert error.code in ("invalid_image", "unsupported_media_format")  # noqa: PT017 - or it has all its pixels
        else:
            assert end > len(data) * 0.8, f"{end} of {len(data)} bytes"


@pytest.mark.parametrize(("width", "height"), [(15_000, 15_000), (13_000, 13_000), (8000, 6251)])
def test_too_many_pixels_are_refused_by_the_header(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bomb(width, height)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels are decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("pixels are decoded"))
    for work in (read_header, decode_image):
        assert refusal(lambda work=work: work(data, LIMITS)).code == "image_too_large"


def test_headers_are_read_without_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [as_file(COLOUR, kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP")]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("pixels are decoded"))
    for data in (*files, with_late_exif(6)):
        read_header(data, LIMITS)


@pytest.mark.parametrize(("width", "height", "code"), [(1, 5000, "invalid_image"), (1, 1, None), (1, 200, None)])
def test_long_and_tiny_pictures(width: int, height: int, code: str | None) -> None:
    data = as_file(Image.new("RGB", (width, height)))
    if code is None:
        assert decode_image(data, LIMITS).shape == (height, width, 3)
    else:
        assert refusal(lambda: read_header(data, LIMITS)).code == code


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
OTHERS = {
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "eps": EPS, "psd": b"8BPS\0\1" + bytes(40),
    "pdf": b"%PDF-1.7\n",
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "ico": as_file(COLOUR, "ICO"), "ppm": as_file(COLOUR, "PPM"),
    "empty": b"", "text": b"hello", "html": b"<!doctype html><title>404</title>", "zeros": bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_with_the_allowed_ones(name: str) -> None:
    error = refusal(lambda: read_header(OTHERS[name], LIMITS))
    assert error.code == "unsupported_media_format"
    assert "JPEG, PNG" in error.message


@pytest.mark.parametrize(
    "start", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"RIFF\0\0\0\0WEBP"]
)
def test_a_signature_alone_is_a_damaged_picture(start: bytes) -> None:
    for data in (start, start + bytes(100), start + b"\xff" * 100):
        assert refusal(lambda data=data: decode_image(data, LIMITS)).code in ("invalid_image", "image_too_large")


def test_no_refusal_repeats_content() -> None:
    for data in (b"secret words of a user", b"\xff\xd8\xffsecret words of a user"):
        assert "secret" not in refusal(lambda data=data: decode_image(data, LIMITS)).message


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "I;16", "LAB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("LAB", (9, 7)) if mode == "LAB" else picture(np.random.default_rng(4), mode, 9, 7)
    data = as_file(image, "TIFF" if mode in ("CMYK", "LAB") else "PNG")
    assert decode_image(data, LIMITS).shape == (7, 9, 3)


def test_a_picture_is_read_by_its_content_not_by_other_formats_of_its_decoder() -> None:
    buffer = io.BytesIO()
    COLOUR.save(buffer, "MPO", save_all=True, append_images=[COLOUR])
    assert read_header(buffer.getvalue(), LIMITS).format == "JPEG"
    assert decode_image(buffer.getvalue(), LIMITS).shape == (16, 24, 3)
