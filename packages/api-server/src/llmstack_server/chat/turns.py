"""Messages for chat templates, from the turns of other APIs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.media.parts import MediaPart
from llmstack_server.chat.stored_media import media_in
from llmstack_server.web.errors import missing_parameter
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject

SYSTEM_JOINT = "\n\n"
PARTS_JOINT = "\n"


Content = str | list[dict[str, str] | MediaPart]
"""A text, or parts where there are media, as chat completions have them."""


class TurnBuilder:
    """Builds messages in the form of chat completions.

    Reasoning, text and calls of the assistant become one message, since templates expect one per turn. Leading system
    messages become one, too: many templates use only the first.

    Attributes:
        messages: The messages so far.
    """

    def __init__(self, *, joins_turns: bool = False) -> None:
        """`joins_turns`: Whether consecutive texts of one role are one turn."""
        self.messages: list[JSONObject] = []
        self._joins_turns = joins_turns
        self._call_id_to_name: dict[str, str] = {}

    def say(self, role: str, text: Content) -> None:
        """Adds a text, or one with media; the role `developer` becomes `system`, which templates know."""
        role = "system" if role == "developer" else role
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != role:
            self.messages.append({"role": role, "content": text})
        elif role == "system" and len(self.messages) == 1:
            last["content"] = _joined(last["content"], SYSTEM_JOINT, text)
        elif role == "assistant" and not last["content"]:
            last["content"] = text
        elif self._joins_turns:
            last["content"] = _joined(last["content"], PARTS_JOINT, text)
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

    def answer(self, call_id: str, text: Content) -> None:
        """Adds the result of a call, with the name of the function where the call is known."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._call_id_to_name.get(call_id)
        self.messages.append(message if name is None else {**message, "name": name})

    def _assistant_turn(self) -> JSONObject:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_assistant_turn()

    def _new_assistant_turn(self) -> JSONObject:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def content_of(pieces: Iterable[str | MediaPart]) -> Content:
    """Texts and media in their order as the content of one message; texts beside each other become one."""
    parts: list[dict[str, str] | MediaPart] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        parts += [*_parts(PARTS_JOINT.join(texts)), piece]
        texts.clear()
    last = PARTS_JOINT.join(texts)
    return [*parts, *_parts(last)] if parts else last


def _joined(first: Content, joint: str, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return first + joint + second
    before, after = _parts(first), _parts(second)
    if before and after and isinstance(before[-1], dict) and isinstance(after[0], dict):
        middle = {"type": "text", "text": before[-1]["text"] + joint + after[0]["text"]}
        return [*before[:-1], middle, *after[1:]]
    return [*before, *after]


def _parts(content: Content) -> list[dict[str, str] | MediaPart]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def in_words_of_api(
    error: InvalidRequestError,
    input_name: str,
    names: Mapping[str, str],
    messages: Sequence[Mapping[str, object]] = (),
) -> InvalidRequestError:
    """An error about built messages, renamed to the field of the request.

    Messages become `input_name`, except that media in `messages` have the request's names already; `names` maps parts
    of the names of tools.
    """
    param = error.param or ""
    if any(param in (part.param, f"{part.param}.type") for part in media_in(messages)):
        return error
    if param.startswith("messages"):
        name = input_name
    elif param.startswith("tool"):
        name = functools.reduce(lambda text, part: text.replace(part, names[part]), names, param)
    else:
        return error
    return InvalidRequestError(error.message.replace(f"'{param}'", f"'{name}'"), param=name, code=error.code)


def required_text(param: str, entry: Mapping[str, object], name: str) -> str:
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
