"""Messages for chat templates, from the turns of other APIs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_server.web.errors import missing_parameter
from llmstack_types import InvalidRequestError

SYSTEM_JOINT = "\n\n"
PARTS_JOINT = "\n"


class TurnBuilder:
    """Builds messages in the form of chat completions.

    Reasoning, text and calls of the assistant become one message, since templates expect one per turn. Leading system
    messages become one, too: many templates use only the first.

    Attributes:
        messages: The messages so far.
    """

    def __init__(self, *, joins_turns: bool = False) -> None:
        """`joins_turns`: Whether consecutive texts of one role are one turn."""
        self.messages: list[dict[str, Any]] = []
        self._joins_turns = joins_turns
        self._call_id_to_name: dict[str, str] = {}

    def say(self, role: str, text: str) -> None:
        """Adds a text; the role `developer` becomes `system`, which templates know."""
        role = "system" if role == "developer" else role
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != role:
            self.messages.append({"role": role, "content": text})
        elif role == "system" and len(self.messages) == 1:
            last["content"] += SYSTEM_JOINT + text
        elif role == "assistant" and not last["content"]:
            last["content"] = text
        elif self._joins_turns:
            last["content"] += PARTS_JOINT + text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Adds reasoning of the assistant, before its text or calls."""
        turn = self._assistant_turn()
        if turn["content"] or "tool_calls" in turn:
            turn = self._new_assistant_turn()
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else before + PARTS_JOINT + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a call by the assistant; `arguments` is a JSON object as text."""
        self._call_id_to_name[call_id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._assistant_turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def answer(self, call_id: str, text: str) -> None:
        """Adds the result of a call, with the name of the function where the call is known."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._call_id_to_name.get(call_id)
        self.messages.append(message if name is None else {**message, "name": name})

    def _assistant_turn(self) -> dict[str, Any]:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_assistant_turn()

    def _new_assistant_turn(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def in_words_of_api(error: InvalidRequestError, input_name: str, names: Mapping[str, str]) -> InvalidRequestError:
    """An error about built messages, renamed to the field of the request.

    Messages become `input_name`; `names` maps parts of the names of tools.
    """
    param = error.param or ""
    if param.startswith("messages"):
        name = input_name
    elif param.startswith("tool"):
        name = functools.reduce(lambda text, part: text.replace(part, names[part]), names, param)
    else:
        return error
    return InvalidRequestError(error.message.replace(f"'{param}'", f"'{name}'"), param=name, code=error.code)


def required_text(param: str, entry: Mapping[str, Any], name: str) -> str:
    """The required text of a part of a request, under `name`.

    Raises:
        InvalidRequestError: It is missing, not a string, or has characters that no tokenizer accepts.
    """
    value = entry.get(name)
    if value is None:
        raise missing_parameter(f"{param}.{name}")
    if not isinstance(value, str):
        raise request_errors.invalid_type(f"{param}.{name}", "a string", value)
    check_text(f"{param}.{name}", value)
    return value
