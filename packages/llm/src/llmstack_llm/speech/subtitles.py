"""Transcripts as subtitles, in the forms of SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_llm.speech.segments import Segment


def srt(segments: Iterable[Segment]) -> str:
    """A file of SubRip: numbered texts with their times."""
    return "".join(
        f"{number}\n{_times(segment, ',')}\n{_text(segment)}\n\n" for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """A file of WebVTT."""
    return "WEBVTT\n\n" + "".join(f"{_times(segment, '.')}\n{_text(segment)}\n\n" for segment in segments)


def text_of(segments: Iterable[Segment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def _text(segment: Segment) -> str:
    """The text in one line, without characters that would end the cue or begin another one."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _times(segment: Segment, point: str) -> str:
    return f"{_time(segment.start_s, point)} --> {_time(segment.end_s, point)}"


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
