"""Parser of server-sent events that measures when tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llmstack_bench.result import RequestResult

MAX_EVENT_BYTES = 16 << 20
_DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class StreamError(Exception):
    """The answer is not a completion stream, or it reports a failed request."""


class EventLines:
    """Splits bytes into the payloads of `data:` lines. Every OpenAI server sends one line per event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes.

        Raises:
            StreamError: An event is larger than 16 MiB.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError("an event of the stream is too large")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class StreamRecorder:
    """Fills a `RequestResult` from the events of one stream."""

    def __init__(self, result: RequestResult, sent_s: float, *, keeps_text: bool = False) -> None:
        self._result = result
        self._keeps_text = keeps_text
        self._sent_s = sent_s
        self._last_token_s = sent_s
        self._num_counted = 0
        self._is_finished = False

    def take(self, payload: bytes, now_s: float) -> None:
        """Records one event that arrived at `now_s`.

        Raises:
            StreamError: The event is not a JSON object, or reports an error.
        """
        if payload == b"[DONE]":
            self._is_finished = True
            return
        event = _decode(payload)
        usage = event.get("usage")
        if usage:
            self._count(usage)
        choices = event.get("choices")
        if choices:
            self._take_choice(choices[0], now_s)

    def close(self) -> None:
        """Checks that the stream is complete.

        Raises:
            StreamError: It ended early, or contained no token.
        """
        if not self._is_finished:
            raise StreamError("the stream ended early")
        result = self._result
        if result.ttft_s is None and result.has_usage and result.num_output_tokens:
            result.ttft_s = result.e2e_s  # of tokens without text, such as one that ends the answer at once
        if result.ttft_s is None:
            raise StreamError("the stream contained no tokens")
        if not result.has_usage:
            result.num_output_tokens = result.num_chunks

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        result = self._result
        result.e2e_s = now_s - self._sent_s
        if choice.get("finish_reason"):
            self._is_finished = True
        if self._keeps_text:
            result.texts.append(_text_of(choice))
        if not _has_token(choice):
            return
        result.num_chunks += 1
        num_new = max(result.num_output_tokens - self._num_counted, 1) if result.has_usage else 1
        self._num_counted += num_new
        if result.ttft_s is None:
            result.ttft_s = result.e2e_s
        else:
            result.token_gaps_s += [(now_s - self._last_token_s) / num_new] * num_new
        self._last_token_s = now_s

    def _count(self, usage: dict[str, Any]) -> None:
        result = self._result
        result.num_prompt_tokens = _as_count(usage.get("prompt_tokens"))
        result.num_cached_tokens = _as_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        num_output_tokens = _as_count(usage.get("completion_tokens"))
        if num_output_tokens is not None:
            result.num_output_tokens, result.has_usage = num_output_tokens, True


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise StreamError(f"an event is not JSON: {payload[:80]!r}") from error
    if not isinstance(event, dict):
        raise StreamError(f"an event is not an object: {payload[:80]!r}")
    if event.get("error"):
        reason = event["error"]
        raise StreamError(f"error in the stream: {reason.get('message') if isinstance(reason, dict) else reason}")
    return event


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk contains tokens. Its text may be empty if a character is still incomplete."""
    is_last = choice.get("finish_reason") is not None
    if "delta" not in choice:
        return bool(choice.get("text")) or not is_last
    delta = choice["delta"] or {}
    return any(delta.get(name) for name in _DELTA_FIELDS) or not (is_last or "role" in delta)


def _text_of(choice: dict[str, Any]) -> str:
    text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
    return text if isinstance(text, str) else ""


def _as_count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
