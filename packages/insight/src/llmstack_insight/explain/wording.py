"""Times and counts in the words of an explanation."""

from __future__ import annotations

from llmstack_types import RequestStatus


def to_ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def to_count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def to_end(status: RequestStatus) -> str:
    """The end of a request in words: `length limit`, `stopped`."""
    if status is RequestStatus.FINISHED_LENGTH_CAPPED:
        return "length limit"
    return status.value.removeprefix("finished_").replace("_", " ")


def to_text(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
