"""Sound files of every form that needs no other library become one channel at one rate; odd headers do no harm."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_helpers.sounds import Samples, chunk, pcm16, tone, wav

from llmstack_media.sound.resample import Resampler
from llmstack_media.sound.samples import mixed, sound_samples
from llmstack_types import InvalidRequestError

TONE = tone()
PCM = pcm16(TONE)


def decoded(data: bytes, max_s: float = 60.0) -> Samples:
    pieces = list(sound_samples(io.BytesIO(data), 16_000, max_s))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


LAWS = {
    7: [-32124, -15484, -7420, -3516, -1628, -716, -276, -64, 23932, 11388, 5372, 2492, 1116, 460, 148, 0],
    6: [-5504, -2624, -24064, -11520, -280, -8, -1248, -592, 7552, 3648, 32256, 15616, 408, 136, 1760, 848],
}
"""Values of every 17th code of µ-law and A-law."""


def compressed(code: int) -> bytes:
    """The tone in the codes whose values are next to it."""
    table = decoded(wav(bytes(range(256)) * 8, code=code, width=8))[:256]
    return np.abs(table - TONE[:, None]).argmin(axis=1).astype(np.uint8).tobytes()


def pcm24(samples: Samples) -> bytes:
    integers = (samples * ((1 << 31) - 256)).astype("<i4")
    return integers.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()


FORMS = {
    "pcm8": wav(((TONE * 127) + 128).astype(np.uint8).tobytes(), width=8),
    "pcm16": wav(PCM),
    "pcm24": wav(pcm24(TONE), width=24),
    "pcm32": wav((TONE * (2**31 - 256)).astype("<i4").tobytes(), width=32),
    "float": wav(TONE.tobytes(), code=3, width=32),
    "double": wav(TONE.astype("<f8").tobytes(), code=3, width=64),
    "µ-law": wav(compressed(7), code=7, width=8),
    "A-law": wav(compressed(6), code=6, width=8),
    "extensible": wav(PCM, code=0xFFFE, extra=struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)),
    "streamed": wav(PCM, size=0xFFFFFFFF),
    "no length": wav(PCM, size=0),
    "LIST before": wav(PCM, before=chunk(b"LIST", b"INFOISFT\5\0\0\0odd!\0")),
    "LIST behind": wav(PCM, behind=chunk(b"LIST", b"INFO" + bytes(4000))),
    "stereo": wav(pcm16(np.stack([TONE, TONE], axis=1)), channels=2),
    "antiphase": wav(pcm16(np.stack([TONE, -TONE], axis=1)), channels=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_wav_file_has_its_samples(form: str) -> None:
    samples = decoded(FORMS[form])
    assert len(samples) == len(TONE)
    loose = {"pcm8": 0.012, "µ-law": 0.02, "A-law": 0.02}
    assert np.abs(samples - TONE).max() < loose.get(form, 1e-4)


@pytest.mark.parametrize("code", LAWS)
def test_g711_equals_the_tables_of_the_standard(code: int) -> None:
    assert (decoded(wav(bytes(range(256)) * 8, code=code, width=8))[:256:17] * 32768).tolist() == LAWS[code]


@given(
    place=st.integers(12, 50), value=st.integers(0, 255), other=st.integers(12, 50), second=st.integers(0, 255),
    length=st.integers(0, 300),
)  # fmt: skip
def test_a_damaged_header_gives_sound_or_is_refused(
    place: int, value: int, other: int, second: int, length: int
) -> None:
    data = bytearray(wav(PCM[:240]))
    data[min(place, len(data) - 1)], data[min(other, len(data) - 1)] = value, second
    with contextlib.suppress(InvalidRequestError):
        samples = decoded(bytes(data[:length]))
        assert np.isfinite(samples).all()


def test_a_file_that_is_cut_gives_what_is_there() -> None:
    whole = wav(PCM)
    assert len(decoded(whole[:1001])) == (1001 - 44) // 2


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "unsupported_media_format"),
        (b"<html>not found</html>", "unsupported_media_format"),
        (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 5004 RTP/AVP 0\r\n", "unsupported_media_format"),
        (b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", "unsupported_media_format"),
        (b"RIFF\0\0\0\0WAVE", "invalid_audio"),
        (b"RIFF\0\0\0\0WAVEfmt \x04\0\0\0\0\0\0\0", "invalid_audio"),
        (b"RIFF\0\0\0\0WAVE" + chunk(b"data", PCM), "invalid_audio"),
        (b"RIFF\0\0\0\0WAVE" + chunk(b"junk", b"") * 300, "invalid_audio"),
        (wav(PCM, channels=0), "invalid_audio"),
        (wav(PCM, channels=65), "invalid_audio"),
        (wav(PCM, rate=0), "invalid_audio"),
        (wav(PCM, rate=400_000_000), "invalid_audio"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(data: bytes, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(data)
    assert caught.value.code == code


def test_seconds_are_counted_while_they_are_decoded() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(wav(pcm16(tone(3.0)), size=0), max_s=1.0)
    assert caught.value.code == "audio_too_long"


def test_samples_that_are_no_numbers_become_finite() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 3.0, 0.25], "<f4")
    assert decoded(wav(odd.tobytes(), code=3, width=32)).tolist() == [0.0, 1.0, -1.0, 1.0, 0.25]


def test_a_channel_that_cancels_the_other_is_left_out() -> None:
    mono = mixed(np.stack([TONE, -0.999 * TONE], axis=1))
    assert (mono == TONE).all()
    both = mixed(np.stack([TONE, tone(hertz=300.0)], axis=1))
    assert np.allclose(both, (TONE + tone(hertz=300.0)) / 2)


@given(
    rate=st.sampled_from([1000, 7999, 8000, 11_025, 22_050, 44_100, 48_000, 96_000]),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
)
def test_resampling_depends_on_no_cut(rate: int, cuts: list[int]) -> None:
    samples = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    whole = Resampler(rate, 16_000)
    expected = np.concatenate([whole.feed(samples), whole.finish()])
    parts = Resampler(rate, 16_000)
    pieces = [parts.feed(piece) for piece in np.split(samples, sorted(cuts))]
    found = np.concatenate([*pieces, parts.finish()])
    assert len(found) == -(-3000 * 16_000 // rate)
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_a_tone_keeps_its_pitch_and_size_at_another_rate(rate: int) -> None:
    resampler = Resampler(rate, 16_000)
    found = np.concatenate([resampler.feed(tone(1.0, rate, 1000.0)), resampler.finish()])
    assert np.abs(found - tone(1.0, 16_000, 1000.0))[200:-200].max() < 2e-4
