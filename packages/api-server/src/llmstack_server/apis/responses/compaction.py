"""`POST /v1/responses/compact`: a conversation becomes a summary."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Sequence
from typing import Final, Literal, TypedDict

from llmstack_server.apis.responses.objects import usage_object
from llmstack_server.apis.responses.store import Item
from llmstack_server.chat.prepare import SubmittedChat
from llmstack_server.chat.stream import ChatStream
from llmstack_server.web.answers import WholeAnswer
from llmstack_server.web.api_types import ResponseUsage
from llmstack_types import RequestFailedError
from llmstack_types.json_values import JSONObject

KIND: Final = "compaction"
INSTRUCTIONS: Final = "Summarize our conversation so far: facts, decisions, results and what is left to do."
"""The last message of the conversation that the model reads."""
_INTRODUCTION: Final = "A summary of our conversation so far:\n\n"
_PREFIX: Final = "summary."
MAX_TOKENS: Final = 2048
"""Of a summary; at most a quarter of the context."""


class CompactedResponse(TypedDict):
    """The messages of a conversation's user, and a summary of all of it."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, object]]
    usage: ResponseUsage


def sealed(summary: str) -> str:
    """The `encrypted_content` of an item: text that clients pass on as it is. It is the client's own, and no secret."""
    return _PREFIX + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()


def message_of(content: str) -> str | None:
    """The message that stands for the item with this `encrypted_content`; None where another server has made it."""
    prefix, text = content[: len(_PREFIX)], content[len(_PREFIX) :]
    if prefix != _PREFIX:
        return None
    try:
        return _INTRODUCTION + base64.b64decode(text, b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class CompactionAnswer(ChatStream, WholeAnswer):
    """The answer to one request."""

    def __init__(self, chat: SubmittedChat, messages: Sequence[Item], answer_id: str, item_id: str) -> None:
        """`messages`: Those of the user, which stay."""
        super().__init__(chat.outputs, chat.plan)
        self._messages, self._id, self._item_id = messages, answer_id, item_id

    async def whole(self) -> JSONObject:
        """The `response.compaction` object.

        Raises:
            RequestFailedError: The model has written no summary.
        """
        [message] = await self.fold()
        if not message.content.strip():
            raise RequestFailedError("the model has written no summary")
        item = {"id": self._item_id, "type": KIND, "encrypted_content": sealed(message.content.strip())}
        return {
            "id": self._id, "object": "response.compaction", "created_at": int(time.time()),
            "output": [*self._messages, item], "usage": usage_object(self.usage),
        }  # fmt: skip
