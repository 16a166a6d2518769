"""Chunks of OpenAI's streams."""

from __future__ import annotations

from llmstack_server.web.sse import encode_json, encode_string, frame
from llmstack_types.json_values import JSONObject


class ChunkEncoder:
    """Encodes the chunks of one stream; fields that all of them share are encoded once."""

    def __init__(self, response_id: str, object_name: str, created: int, model: str, has_usage: bool) -> None:
        shared = {"id": response_id, "object": object_name, "created": created, "model": model}
        self._head = encode_json(shared)[:-1] + ',"choices":'
        self._tail = ',"usage":null}' if has_usage else "}"

    def encode(self, choices: list[JSONObject], extra: JSONObject | None = None) -> bytes:
        """One event; `extra` holds further fields of the chunk, `usage` among them."""
        if not extra:
            return frame(self._head + encode_json(choices) + self._tail)
        tail = "}" if "usage" in extra else self._tail
        return frame(self._head + encode_json(choices) + "," + encode_json(extra)[1:-1] + tail)

    def encode_content(self, index: int, text: str) -> bytes:
        """A chunk of a chat with text only: equal to `encode` of such a choice, in a fifth of the time."""
        choice = f'{{"index":{index},"delta":{{"content":{encode_string(text)}}},"logprobs":null,"finish_reason":null}}'
        return f"data: {self._head}[{choice}]{self._tail}\n\n".encode("utf-8", "replace")

    def encode_text(self, index: int, text: str) -> bytes:
        """A chunk of a completion with text only."""
        choice = f'{{"index":{index},"text":{encode_string(text)},"logprobs":null,"finish_reason":null}}'
        return frame(f"{self._head}[{choice}]{self._tail}")
